-- How many leading blocks of a chain each active holder has.
-- Residency is prefix-closed, so along a chain the active holders only get fewer: equal values at two places mean equal
-- active holders between them. Probes where the caller guesses that runs begin and end, then every `stride` blocks; and, level by
-- level and in one HMGET each, the middle of every interval whose ends differ.

local FIELD_BYTES = 256 -- what a field costs besides its value's bytes
local BYTES = 600000 -- after so many, the caller asks for the rest
local WIDE_BYTES = 1024 -- of wider values fewer are probed at a time
local PLACES = 256 -- as many of the caller's guesses are probed at a time: twice MOST_RUNS in kvatlas/index/run_guesses.py

-- A gallop: {blocks = key, packed, last = index of the last hash, stride, guess, next_guess = the first of them that was not probed,
--   left = the block up to which all runs are known, left_value, spent = bytes read}
-- Intervals are a flat list {low, high, value at low, value at high...}, from left to right; their ends' values differ.

-- Returns the blocks to be probed next: guesses, or every `stride` blocks if none is left. {index...}, {hash...}, how many.
local function next_probes(gallop, cost)
  local guess, packed, last, sub = gallop.guess, gallop.packed, gallop.last, string.sub
  local rights, hashes, n, at = {}, {}, 0, gallop.left
  local places, next_guess = math.max(4, math.min(PLACES, math.floor(BYTES / 4 / cost))), gallop.next_guess
  while n < places and guess[next_guess] do
    local place = guess[next_guess]
    next_guess = next_guess + 1
    if place > at and place <= last then
      at = place
      n = n + 1
      rights[n], hashes[n] = at, sub(packed, at * 8 + 1, at * 8 + 8)
    end
  end
  gallop.next_guess = next_guess
  if n == 0 then
    local stride = gallop.stride
    local most = math.floor(CHUNK / stride) -- so that no level of theirs has more than CHUNK middles
    local probes = math.max(4, math.floor(most * math.min(1, WIDE_BYTES / #gallop.left_value)))
    while n < probes and at < last do
      at = math.min(at + stride, last)
      n = n + 1
      rights[n], hashes[n] = at, sub(packed, at * 8 + 1, at * 8 + 8)
    end
  end
  return rights, hashes, n
end

-- Returns the intervals between these probes and the block before them, and how long the list is; the gallop's `left` moves to
-- the last probe, or to the first one without a holder.
local function intervals_of(gallop, rights, found, n)
  local intervals, m, left, left_value = {}, 0, gallop.left, gallop.left_value
  for i = 1, n do
    local right, value = rights[i], found[i]
    if value ~= left_value then
      intervals[m + 1], intervals[m + 2], intervals[m + 3], intervals[m + 4] = left, right, left_value, value
      m = m + 4
    end
    left, left_value = right, value
    if not value then
      break
    end
  end
  gallop.left, gallop.left_value = left, left_value
  return intervals, m
end

-- Reads the middles of all intervals. Returns those of their halves whose ends differ, and how long that list is; nil if no
-- interval has a middle.
local function halve(gallop, intervals, m, cost)
  local hashes, n, packed, sub = {}, 0, gallop.packed, string.sub
  for i = 1, m, 4 do
    local low, high = intervals[i], intervals[i + 1]
    if high - low > 1 then
      local middle = (low + high - (low + high) % 2) * 4
      n = n + 1
      hashes[n] = sub(packed, middle + 1, middle + 8)
    end
  end
  if n == 0 then
    return nil, 0
  end
  local found, halves, k = read_values(gallop.blocks, hashes, n), {}, 0
  gallop.spent = gallop.spent + n * cost
  n = 0
  for i = 1, m, 4 do
    local low, high, low_value, high_value = intervals[i], intervals[i + 1], intervals[i + 2], intervals[i + 3]
    if high - low > 1 then
      local middle = (low + high - (low + high) % 2) / 2
      n = n + 1
      local value = found[n]
      if value ~= low_value then
        halves[k + 1], halves[k + 2], halves[k + 3], halves[k + 4] = low, middle, low_value, value
        k = k + 4
      end
      low, low_value = value and middle or high, value -- no holder at the middle: nothing behind it counts
    end
    if low < high and low_value ~= high_value then
      halves[k + 1], halves[k + 2], halves[k + 3], halves[k + 4] = low, high, low_value, high_value
      k = k + 4
    end
  end
  return halves, k
end

-- Returns runs of equal values: {start...}, {value...}, the first block without a holder (count if all have one), and the
-- block from which the rest has to be asked for (nil: there is none). `guess`: the blocks to be probed first, ascending.
local function gallop_along(blocks, packed, count, stride, guess)
  local first_value = redis.call('HGET', blocks, string.sub(packed, 1, 8))
  if not first_value then
    return {}, {}, 0
  end
  local gallop = {
    blocks = blocks, packed = packed, last = count - 1, stride = stride, guess = guess, next_guess = 1, left = 0,
    left_value = first_value, spent = 0,
  }
  local starts, values, runs = { 0 }, { first_value }, 1
  while gallop.left < gallop.last do
    if gallop.spent > BYTES then
      if starts[runs] == gallop.left then
        starts[runs], values[runs] = nil, nil
      end
      return starts, values, gallop.left, gallop.left
    end
    local cost = FIELD_BYTES + #gallop.left_value -- values only get shorter
    local rights, hashes, n = next_probes(gallop, cost)
    gallop.spent = gallop.spent + n * cost
    local intervals, m = intervals_of(gallop, rights, read_values(blocks, hashes, n), n)
    local halves, k = intervals, m
    while halves do
      intervals, m = halves, k
      halves, k = halve(gallop, intervals, m, cost)
    end
    for i = 1, m, 4 do
      local start, value = intervals[i + 1], intervals[i + 3]
      if not value then
        return starts, values, start
      end
      runs = runs + 1
      starts[runs], values[runs] = start, value
    end
  end
  return starts, values, count
end

-- Returns the same, by reading every block.
local function walk(blocks, packed, count)
  local starts, values, previous = {}, {}, nil
  for first = 0, count - 1, CHUNK do
    local last = math.min(first + CHUNK, count) - 1
    local found = redis.call('HMGET', blocks, unpack(split(string.sub(packed, first * 8 + 1, last * 8 + 8))))
    for i = 1, #found do
      local value = found[i]
      if not value then
        return starts, values, first + i - 1
      end
      if value ~= previous then
        starts[#starts + 1], values[#values + 1] = first + i - 1, value
        previous = value
      end
    end
  end
  return starts, values, count
end

-- overlap: runs of equal holders values along a chain, up to the first block without a holder; and how far the marked holders
-- among them can resume it.
--
-- KEYS 1 blocks of the scope
--      2 meta
--      3 marked
--      4 marks of the scope
-- ARGV 1 packed hashes
--      2 stride (0: read every block)
--      3 index of the first hash in its chain, a multiple of SEGMENT; '': marks are not asked for
--      4 the highest position to be resumed at, in blocks from the chain's start
--      5 where runs probably begin and end: indices in ARGV 1 (u32 BE), ascending; may be absent
-- returns {version of the active holders (see active.lua), {value...}, {run length...}, reach, left, next}
--   reach: 3-byte number and position (u32 BE; 0: none) of each marked holder of the first block
--   left: 3-byte number and index (u32 BE) of the marked holders that are missing in `reach`, for `kvatlas_resume`: their marks
--   below that index are not looked at, nor those behind what the holder has
--   next: 0, or the index in ARGV 1 from which the hashes are not looked at: to be asked for by another call
register_read_only('kvatlas_overlap', function(keys, args)
  local blocks, meta, packed, stride = keys[1], keys[2], args[1], tonumber(args[2])
  local count = #packed / 8
  local version = redis.call('HGET', meta, 'active') or '0'
  if count == 0 then
    return { version, {}, {}, '', '', 0 }
  end
  local starts, values, stop, next_index
  if stride == 0 then
    starts, values, stop = walk(blocks, packed, count)
  else
    local places = math.floor(#(args[5] or '') / 4)
    local guess = places > 0 and { struct.unpack('>' .. string.rep('I4', math.min(places, CHUNK)), args[5]) } or {}
    guess[#guess] = nil -- the position behind them
    starts, values, stop, next_index = gallop_along(blocks, packed, count, stride, guess)
  end
  local reach, left = '', ''
  if args[3] ~= '' and starts[1] and redis.call('HLEN', keys[3]) > 0 then
    local first, limit = tonumber(args[3]), tonumber(args[4])
    local names, belows = marked_in(values[1], keys[3]), {}
    if next_index or #names > HOLDERS then -- in calls of their own
      for i = 1, #names do
        belows[i] = names[i] .. '\255\255\255\255'
      end
      left = table.concat(belows)
    else
      for i = 1, #names do
        belows[i] = first + (#values == 1 and stop or depth_of(names[i], starts, values, stop))
      end
      reach, left = resume(keys[3], keys[4], packed, first, limit, names, belows)
    end
  end
  for i = 1, #starts do -- starts become lengths
    starts[i] = (starts[i + 1] or stop) - starts[i]
  end
  return { version, values, starts, reach, left, next_index or 0 }
end)
