-- Finds the deepest position at which each marked holder can resume a chain. The answer is exact, and takes reading a few
-- fields for each holder.

local NEAR = 2 -- segments that are read first: the one in which a holder's depth lies, and the one before it
local HOLDERS = 64 -- holders whose marks one call reads
local BUDGET = 1000 -- fields and entries that one call reads beyond the near segments
local HEADS_A_READ = 32
local MOST_CHAIN = 2097152 -- bytes of a chain's hashes, and of the call's other arguments
local NOWHERE = '\0\0\0\0'

local function highest_bit(word)
  local _, exponent = math.frexp(word)
  return exponent - 1
end

-- Returns a head's bits up to an offset as two 32-bit words.
local function bits_up_to(value, entry, offset)
  local high, low = struct.unpack('>I4I4', value, entry + 3)
  if offset < 32 then
    return 0, offset < 31 and low % 2 ^ (offset + 1) or low
  end
  return offset < 63 and high % 2 ^ (offset - 31) or high, low
end

-- Returns how many leading blocks a holder of the first run has: the holder is in all runs up to some run, and in none after
-- it.
local function depth_of(holder, starts, values, stop)
  local low, high = 1, #values + 1
  while high - low > 1 do
    local middle = math.floor((low + high) / 2)
    if find_sized(values[middle], holder, 4) then
      low = middle
    else
      high = middle
    end
  end
  return starts[high] or stop
end

-- Returns those holders of a value that have marks.
local function marked_in(value, marked)
  local names, n = {}, 0
  for first = 1, #value, 4 * CHUNK do
    local some = {}
    for at = first, math.min(first + 4 * CHUNK, #value) - 3, 4 do
      some[#some + 1] = string.sub(value, at, at + 2)
    end
    local found = redis.call('HMGET', marked, unpack(some))
    for i = 1, #some do
      if found[i] then
        n = n + 1
        names[n] = some[i]
      end
    end
  end
  return names
end

-- A search: {key = the scope's marks, packed = hashes from index `first` on, names, drops, tops, n, found, spent}
--   names, drops, tops: the n holders that have no answer yet; for each, the blocks between a position and its mark, and the
--     last block that may be its mark, counted from `first`
--   found: the answers: {number and position, packed...}
--   spent: how many fields and entries were looked at

local function segment_of(index)
  return (index - index % SEGMENT) / SEGMENT
end

-- Records the answer for a holder: it can resume the chain after the block at this index, or nowhere if that is nil.
local function answer(search, holder, drop, index)
  local found = search.found
  found[#found + 1] = holder .. (index and struct.pack('>I4', math.max(0, search.first + index + 1 - drop)) or NOWHERE)
end

-- Begins a search for those of these holders that have marks, and records answers for those that can't have any in this chain.
local function begin_search(marked, key, packed, first, limit, names, belows)
  local drops, tops, n = #names > 0 and redis.call('HMGET', marked, unpack(names)) or {}, {}, 0
  local search = { key = key, packed = packed, first = first, names = names, drops = drops, tops = tops, found = {}, spent = 0 }
  local last = math.floor(#packed / 8) - 1
  local min, byte = math.min, string.byte
  for i = 1, #names do
    if drops[i] then
      local drop = byte(drops[i], 1) or 0 -- damage that the scrub will find
      local top = min(belows[i] - first - 1, limit + drop - first - 1, last)
      if top >= 0 then
        n = n + 1
        names[n], drops[n], tops[n] = names[i], drop, top
      else
        answer(search, names[i])
      end
    end
  end
  search.n = n
  return search
end

-- Reads the heads of the segments in which the holders' tops lie, and of the segments before these. Returns {head...} and
-- {segment -> its place in that list}.
local function read_near_heads(search)
  local packed, tops, sub, max, fields, n, place_of = search.packed, search.tops, string.sub, math.max, {}, 0, {}
  for i = 1, search.n do
    local segment = segment_of(tops[i])
    for s = max(0, segment - NEAR + 1), segment do
      if not place_of[s] then
        n = n + 1
        place_of[s], fields[n] = n, sub(packed, s * SEGMENT * 8 + 1, s * SEGMENT * 8 + 8) .. HEAD_SUFFIX
      end
    end
  end
  return redis.call('HMGET', search.key, unpack(fields, 1, n)), place_of
end

-- Returns the last block for which each holder has a bit in the heads near its depth: {index..., or false if there is none}.
local function last_bits(search)
  local names, tops, max, heads, place_of = search.names, search.tops, math.max, read_near_heads(search)
  local likely = {}
  for i = 1, search.n do
    local top, holder = tops[i], names[i]
    local segment = segment_of(top)
    likely[i] = false
    for s = segment, max(0, segment - NEAR + 1), -1 do
      local value = heads[place_of[s]]
      local entry = value and find_sized(value, holder, HEAD)
      if entry then
        local high, low = bits_up_to(value, entry, s == segment and top % SEGMENT or SEGMENT - 1)
        if high > 0 or low > 0 then
          likely[i] = s * SEGMENT + (high > 0 and 32 + highest_bit(high) or highest_bit(low))
          break
        end
      end
    end
  end
  return likely
end

-- Records answers for the holders whose last bit near their depth is a mark, which is almost always all of them.
local function answer_near(search)
  local names, drops, tops, packed, sub = search.names, search.drops, search.tops, search.packed, string.sub
  local likely, fields, n, place_of = last_bits(search), {}, 0, {}
  for i = 1, search.n do
    local index = likely[i]
    if index and not place_of[index] then
      n = n + 1
      fields[n], place_of[index] = sub(packed, index * 8 + 1, index * 8 + 8), n
    end
  end
  local marks, left = n > 0 and redis.call('HMGET', search.key, unpack(fields, 1, n)) or {}, 0
  for i = 1, search.n do
    local index, holder = likely[i], names[i]
    local value = index and marks[place_of[index]]
    if value and find_sized(value, holder, MARK) then
      answer(search, holder, drops[i], index)
    else -- the bit belongs to a different branch, or there is none nearby
      local rest = index and index - 1 or (segment_of(tops[i]) - NEAR + 1) * SEGMENT - 1
      if rest >= 0 then
        left = left + 1
        names[left], drops[left], tops[left] = holder, drops[i], rest
      else
        answer(search, holder)
      end
    end
  end
  search.n = left
end

-- Returns which holders (as indices of `names`) have bits in the head of the segment that begins at `base`, and the union of
-- these bits as two 32-bit words.
local function bits_in(search, value, base)
  local names, numbers, tops, here, c = search.names, search.numbers, search.tops, {}, 0
  local any_high, any_low, before, last, spent = 0, 0, 0, -1, search.spent
  for i = 1, search.n do
    if tops[i] >= base then
      spent = spent + 1
      local number, entry = numbers[names[i]]
      entry, before = place_after(value, number, HEAD, number > last and before or 0)
      last = number
      if entry then
        local high, low = bits_up_to(value, entry, math.min(tops[i] - base, SEGMENT - 1))
        if high > 0 or low > 0 then
          c = c + 1
          here[c] = i
          any_high, any_low = bit.bor(any_high, high), bit.bor(any_low, low)
        end
      end
    end
  end
  search.spent = spent
  return here, any_high % TWO32, any_low % TWO32
end

-- Returns the indices of the blocks that a segment's bits stand for, the last one first.
local function indices_of(base, high, low)
  local indices, n = {}, 0
  while high > 0 or low > 0 do
    local offset
    if high > 0 then
      offset = highest_bit(high)
      high = high - 2 ^ offset
      offset = offset + 32
    else
      offset = highest_bit(low)
      low = low - 2 ^ offset
    end
    n = n + 1
    indices[n] = base + offset
  end
  return indices
end

-- Records answers for the holders in `here` (indices of `names`) that have a mark at one of these blocks. Returns the index at
-- which the budget ran out; nil if all blocks were looked at.
local function answer_marked(search, here, indices)
  local names, tops, numbers, packed, fields = search.names, search.tops, search.numbers, search.packed, {}
  local sub = string.sub
  for j = 1, #indices do
    fields[j] = sub(packed, indices[j] * 8 + 1, indices[j] * 8 + 8)
  end
  local marks = redis.call('HMGET', search.key, unpack(fields))
  search.spent = search.spent + #indices
  for j = 1, #indices do
    local mark, index = marks[j], indices[j]
    if mark then
      search.spent = search.spent + #here
      local before, last = 0, -1
      for q = 1, #here do
        local i = here[q]
        if tops[i] >= index then
          local number, entry = numbers[names[i]]
          entry, before = place_after(mark, number, MARK, number > last and before or 0)
          last = number
          if entry then
            answer(search, names[i], search.drops[i], index)
            tops[i] = -1
          end
        end
      end
    end
    if search.spent > BUDGET then
      return index
    end
  end
  return nil
end

local function drop_answered(search)
  local names, drops, tops, left = search.names, search.drops, search.tops, 0
  for i = 1, search.n do
    if tops[i] >= 0 then
      left = left + 1
      names[left], drops[left], tops[left] = names[i], drops[i], tops[i]
    end
  end
  search.n = left
end

-- Looks at all bits of the holders that have no answer yet, segment by segment, from the deepest one on. Returns the index at
-- which the budget ran out; nil if it was sufficient.
local function answer_all(search)
  local packed, sub, deepest = search.packed, string.sub, -1
  search.numbers = {}
  for i = 1, search.n do
    search.numbers[search.names[i]], deepest = number_of(search.names[i]), math.max(deepest, search.tops[i])
  end
  local heads, first_read = {}, math.floor(deepest / SEGMENT) + 1
  for s = first_read - 1, 0, -1 do
    if s < first_read then
      first_read = math.max(0, s - HEADS_A_READ + 1)
      local fields = {}
      for segment = first_read, s do
        fields[#fields + 1] = sub(packed, segment * SEGMENT * 8 + 1, segment * SEGMENT * 8 + 8) .. HEAD_SUFFIX
      end
      heads = redis.call('HMGET', search.key, unpack(fields))
    end
    local value, base, stopped_at = heads[s - first_read + 1], s * SEGMENT, nil
    if value then
      local here, high, low = bits_in(search, value, base)
      if here[1] then
        stopped_at = answer_marked(search, here, indices_of(base, high, low))
        drop_answered(search)
      end
      if search.n == 0 then
        return nil
      elseif search.spent > BUDGET then
        return stopped_at or base
      end
    end
  end
  return nil
end

-- Returns two packed lists:
-- {number, position (u32 BE)...}: where marked holders can resume the chain; 0: nowhere
-- {number, below (u32 BE)...}: holders without an answer yet; they have no mark at `below` or after it
-- Positions are at most `limit`. They and `below` are counted from the prompt's start.
--
-- packed: the hashes from index `first` on, which is a multiple of SEGMENT
-- names, belows: the holders, and for each the index below which its marks are considered, at most the number of blocks
--   that it holds
local function resume(marked, key, packed, first, limit, names, belows)
  local search = begin_search(marked, key, packed, first, limit, names, belows)
  if search.n > 0 then
    answer_near(search)
  end
  local stopped_at, left = nil, {}
  if search.n > 0 then
    stopped_at = answer_all(search)
  end
  for i = 1, search.n do
    if stopped_at then
      left[i] = search.names[i] .. struct.pack('>I4', first + math.min(search.tops[i] + 1, stopped_at))
    else
      answer(search, search.names[i])
    end
  end
  return table.concat(search.found), table.concat(left)
end
