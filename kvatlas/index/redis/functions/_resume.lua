-- The deepest position at which each marked holder can resume a chain: exact, from a few fields for each holder.

local NEAR = 2 -- segments looked at first: the one that a holder's depth lies in, and those above it
local HOLDERS = 64 -- whose marks are looked at in one call
local BUDGET = 1000 -- fields and entries looked at beyond that in one call

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

-- Returns {number, position (u32 BE)...} packed of marked holders, 0 if a holder can resume the chain nowhere; and
-- {number, below (u32 BE)...} packed of those that are left, '' if none: their marks at `below` and behind it are looked at.
-- Positions are at most `limit`, and they and `below` count from the prompt's start.
--
-- packed: hashes from index `first` on, a multiple of SEGMENT
-- names, belows: the holders, and the index below which each one's marks count: at most the end of what it holds
local function resume(marked, key, packed, first, limit, names, belows)
  local sub = string.sub
  local found, m = {}, 0
  local drops = #names > 0 and redis.call('HMGET', marked, unpack(names)) or {}
  local tops, n, deepest = {}, 0, -1 -- of each that waits: the last block that may be marked, counted from `first`
  local segments, segment_at, segments_n = {}, {}, 0
  for i = 1, #names do
    local drop = drops[i] and string.byte(drops[i], 1) or 0
    local top = drops[i] and math.min(belows[i], limit + drop) - first - 1 or -1
    if top >= 0 then
      n = n + 1
      names[n], drops[n], tops[n] = names[i], drop, top
      deepest = math.max(deepest, top)
      local segment = (top - top % SEGMENT) / SEGMENT
      for s = math.max(0, segment - NEAR + 1), segment do
        if not segment_at[s] then
          segments_n = segments_n + 1
          segment_at[s] = segments_n
          segments[segments_n] = sub(packed, s * SEGMENT * 8 + 1, s * SEGMENT * 8 + 8) .. HEAD_SUFFIX
        end
      end
    elseif drops[i] then
      m = m + 1
      found[m] = names[i] .. '\0\0\0\0'
    end
  end
  if n == 0 then
    return table.concat(found), ''
  end

  -- first the last bit of each in the segments near its depth: almost always its mark
  local heads = redis.call('HMGET', key, unpack(segments, 1, segments_n))
  local likely, index_at, indices, k = {}, {}, {}, 0
  for i = 1, n do
    local top, holder = tops[i], names[i]
    local segment = (top - top % SEGMENT) / SEGMENT
    for s = segment, math.max(0, segment - NEAR + 1), -1 do
      local value = heads[segment_at[s]]
      local entry = value and find_sized(value, holder, HEAD)
      if entry then
        local high, low = bits_up_to(value, entry, s == segment and top % SEGMENT or SEGMENT - 1)
        local offset = high > 0 and 32 + highest_bit(high) or low > 0 and highest_bit(low)
        if offset then
          local index = s * SEGMENT + offset
          likely[i] = index
          if not index_at[index] then
            k = k + 1
            index_at[index], indices[k] = k, sub(packed, index * 8 + 1, index * 8 + 8)
          end
          break
        end
      end
    end
  end
  local marks = k > 0 and redis.call('HMGET', key, unpack(indices, 1, k)) or {}
  local left = 0
  for i = 1, n do
    local index, holder = likely[i], names[i]
    local value = index and marks[index_at[index]]
    if value and find_sized(value, holder, MARK) then
      m = m + 1
      found[m] = holder .. struct.pack('>I4', math.max(0, first + index + 1 - drops[i]))
    else -- another branch's, or none near
      local rest = index and index - 1 or (math.floor(tops[i] / SEGMENT) - NEAR + 1) * SEGMENT - 1
      if rest >= 0 then
        left = left + 1
        names[left], drops[left], tops[left] = holder, drops[i], rest
      else
        m = m + 1
        found[m] = holder .. '\0\0\0\0'
      end
    end
  end
  n = left

  -- then all bits of those that are left, segment by segment from the deepest on
  local spent, first_read, numbers = 0, math.floor(deepest / SEGMENT) + 1, {}
  for i = 1, n do
    numbers[names[i]] = number_of(names[i])
  end
  for s = first_read - 1, 0, -1 do
    if n == 0 then
      break
    end
    if s < first_read then -- the next heads
      first_read = math.max(0, s - 31)
      for at = first_read, s do
        segments[at - first_read + 1] = sub(packed, at * SEGMENT * 8 + 1, at * SEGMENT * 8 + 8) .. HEAD_SUFFIX
      end
      heads = redis.call('HMGET', key, unpack(segments, 1, s - first_read + 1))
    end
    local value, base = heads[s - first_read + 1], s * SEGMENT
    if value then
      local any_high, any_low, here, c, before, last = 0, 0, {}, 0, 0, -1
      for i = 1, n do
        if tops[i] >= base then
          spent = spent + 1
          local number, entry = numbers[names[i]], nil
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
      any_high, any_low = any_high % TWO32, any_low % TWO32
      local offsets, asked = {}, 0
      while any_high > 0 or any_low > 0 do
        local offset
        if any_high > 0 then
          offset = highest_bit(any_high)
          any_high = any_high - 2 ^ offset
          offset = offset + 32
        else
          offset = highest_bit(any_low)
          any_low = any_low - 2 ^ offset
        end
        asked = asked + 1
        offsets[asked], indices[asked] = offset, sub(packed, (base + offset) * 8 + 1, (base + offset) * 8 + 8)
      end
      local stopped_at
      if asked > 0 then
        spent = spent + asked
        marks = redis.call('HMGET', key, unpack(indices, 1, asked))
        for j = 1, asked do
          local mark, index = marks[j], base + offsets[j]
          if mark then
            spent = spent + c
            before, last = 0, -1
            for q = 1, c do
              local i = here[q]
              if tops[i] >= index then
                local number, entry = numbers[names[i]], nil
                entry, before = place_after(mark, number, MARK, number > last and before or 0)
                last = number
                if entry then
                  m = m + 1
                  found[m] = names[i] .. struct.pack('>I4', math.max(0, first + index + 1 - drops[i]))
                  tops[i] = -1
                end
              end
            end
          end
          if spent > BUDGET then
            stopped_at = index
            break
          end
        end
        left = 0
        for i = 1, n do
          if tops[i] >= 0 then
            left = left + 1
            names[left], drops[left], tops[left] = names[i], drops[i], tops[i]
          end
        end
        n = left
      end
      if spent > BUDGET and n > 0 then
        local left_over = {}
        for i = 1, n do
          left_over[i] = names[i] .. struct.pack('>I4', first + math.min(tops[i] + 1, stopped_at or base))
        end
        return table.concat(found), table.concat(left_over)
      end
    end
  end
  for i = 1, n do
    m = m + 1
    found[m] = names[i] .. '\0\0\0\0'
  end
  return table.concat(found), ''
end
