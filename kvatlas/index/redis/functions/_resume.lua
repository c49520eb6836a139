-- The deepest position at which each marked holder can resume a chain: exact, from a few fields for each holder.

local NEAR = 2 -- segments looked at first: the one that a holder's depth lies in, and those above it
local HOLDERS = 64 -- whose marks are looked at in one call
local BUDGET = 1000 -- fields and entries looked at beyond that in one call
local HEADS_A_READ = 32
local NOWHERE = '\0\0\0\0'

local function highest_bit(word)
  local _, exponent = math.frexp(word)
  return exponent - 1
end

-- Returns the two words of a head's bits up to an offset.
local function bits_up_to(value, entry, offset)
  local high, low = struct.unpack('>I4I4', value, entry + 3)
  if offset < 32 then
    return 0, offset < 31 and low % 2 ^ (offset + 1) or low
  end
  return offset < 63 and high % 2 ^ (offset - 31) or high, low
end

-- Returns how many leading blocks a holder of the first run has: it is in the runs up to one, and in none behind.
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

-- Returns the numbers of a value's holders that are marked.
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
--   names, drops, tops: of the n holders that have no answer yet: number, blocks that a position lies before its mark, and the
--     last block that may be marked, counted from `first`
--   found: {number and position, packed...} of all others
--   spent: fields and entries looked at

local function segment_of(index)
  return (index - index % SEGMENT) / SEGMENT
end

local function hash_at(search, index)
  return string.sub(search.packed, index * 8 + 1, index * 8 + 8)
end

local function head_field(search, segment)
  return hash_at(search, segment * SEGMENT) .. HEAD_SUFFIX
end

-- The holder can resume the chain behind the block at an index; nil: nowhere.
local function answer(search, holder, drop, index)
  local found = search.found
  found[#found + 1] = holder .. (index and struct.pack('>I4', math.max(0, search.first + index + 1 - drop)) or NOWHERE)
end

-- Begins a search for those of these holders that are marked; those that can have no mark are answered.
local function begin_search(marked, key, packed, first, limit, names, belows)
  local search = { key = key, packed = packed, first = first, names = {}, drops = {}, tops = {}, n = 0, found = {}, spent = 0 }
  local marks, n = #names > 0 and redis.call('HMGET', marked, unpack(names)) or {}, 0
  for i = 1, #names do
    if marks[i] then
      local drop = string.byte(marks[i], 1)
      local top = math.min(belows[i], limit + drop) - first - 1
      if top >= 0 then
        n = n + 1
        search.names[n], search.drops[n], search.tops[n] = names[i], drop, top
      else
        answer(search, names[i])
      end
    end
  end
  search.n = n
  return search
end

-- Returns the heads of the segments that the holders' tops lie in, and of those above, by number of the segment.
local function read_near_heads(search)
  local fields, segments, seen = {}, {}, {}
  for i = 1, search.n do
    local segment = segment_of(search.tops[i])
    for s = math.max(0, segment - NEAR + 1), segment do
      if not seen[s] then
        seen[s] = true
        fields[#fields + 1], segments[#segments + 1] = head_field(search, s), s
      end
    end
  end
  local heads = {}
  for i, value in ipairs(redis.call('HMGET', search.key, unpack(fields))) do
    heads[segments[i]] = value
  end
  return heads
end

-- Returns the last block up to `top` for which a holder has a bit in these heads; nil without one.
local function last_bit(heads, holder, top)
  local segment = segment_of(top)
  for s = segment, math.max(0, segment - NEAR + 1), -1 do
    local value = heads[s]
    local entry = value and find_sized(value, holder, HEAD)
    if entry then
      local high, low = bits_up_to(value, entry, s == segment and top % SEGMENT or SEGMENT - 1)
      local offset = high > 0 and 32 + highest_bit(high) or low > 0 and highest_bit(low)
      if offset then
        return s * SEGMENT + offset
      end
    end
  end
  return nil
end

-- Answers the holders whose last bit near their depth is a mark: almost always all of them.
local function answer_near(search)
  local names, drops, tops, heads = search.names, search.drops, search.tops, read_near_heads(search)
  local likely, fields, field_of = {}, {}, {}
  for i = 1, search.n do
    local index = last_bit(heads, names[i], tops[i])
    likely[i] = index
    if index and not field_of[index] then
      fields[#fields + 1] = hash_at(search, index)
      field_of[index] = #fields
    end
  end
  local marks = fields[1] and redis.call('HMGET', search.key, unpack(fields)) or {}
  local left = 0
  for i = 1, search.n do
    local index, holder = likely[i], names[i]
    local value = index and marks[field_of[index]]
    if value and find_sized(value, holder, MARK) then
      answer(search, holder, drops[i], index)
    else -- another branch's, or none near
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

-- Returns which holders (as places in `names`) have bits in the head of the segment that begins at `base`, and all these bits as
-- two words.
local function bits_in(search, value, base)
  local numbers, tops, here, c = search.numbers, search.tops, {}, 0
  local any_high, any_low, before, last = 0, 0, 0, -1
  for i = 1, search.n do
    if tops[i] >= base then
      search.spent = search.spent + 1
      local number, entry = numbers[search.names[i]], nil
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
  return here, any_high % TWO32, any_low % TWO32
end

-- Returns the indices that the bits of a segment stand for, the last one first.
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

-- Answers those of some holders (`here`: places in `names`) that are marked at one of these blocks. Returns the index at which
-- the budget was spent; nil if all were looked at.
local function answer_marked(search, here, indices)
  local names, tops, numbers, fields = search.names, search.tops, search.numbers, {}
  for j = 1, #indices do
    fields[j] = hash_at(search, indices[j])
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
          local number, entry = numbers[names[i]], nil
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

-- Looks at all bits of the holders that have no answer, segment by segment from the deepest on. Returns the index at which the
-- budget was spent; nil if it was enough.
local function answer_all(search)
  local deepest = -1
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
        fields[#fields + 1] = head_field(search, segment)
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

-- Returns {number, position (u32 BE)...} packed of marked holders, 0 if a holder can resume the chain nowhere; and
-- {number, below (u32 BE)...} packed of those that are left, '' if none: their marks at `below` and behind it are looked at.
-- Positions are at most `limit`, and they and `below` count from the prompt's start.
--
-- packed: hashes from index `first` on, a multiple of SEGMENT
-- names, belows: the holders, and the index below which each one's marks count: at most the end of what it holds
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
