-- Residency is prefix-closed, so active holders can only disappear along a chain: if the values at two places are equal, so are
-- the active holders between them. We probe where the caller guesses that runs begin and end, then every `stride` blocks; after
-- that, level by level with one HMGET each, the middle of every interval whose ends differ.

local FIELD_BYTES = 256 -- cost of a field in addition to the bytes of its value
local BYTES = 600000 -- after this many bytes, the caller has to ask for the rest
local WIDE_BYTES = 1024 -- if values are longer than this, fewer are probed at a time
local WALKED = 256 -- blocks that a walk reads at a time
local MOST_STRIDE, ROUND = 256, 1024 -- the longest stride, and blocks between the probes of one round
local MOST_OPEN = 128 -- intervals that one level halves; the next round looks at the others
local PLACES = 256 -- this many of the caller's guesses are probed at a time: twice MOST_RUNS in kvatlas/index/run_guesses.py

-- Returns the blocks after `left` that are to be probed next, as {index...} and their number: guesses from `next_guess` on or,
-- if there are none left, every `stride` blocks; and the new `next_guess`. `hashes` is filled.
local function next_probes(packed, left, last, stride, guess, next_guess, cost, hashes)
  local rights, n, at, sub = {}, 0, left, string.sub
  local places = math.max(4, math.min(PLACES, math.floor(BYTES / 4 / cost)))
  while n < places and guess[next_guess] do
    local place = guess[next_guess]
    next_guess = next_guess + 1
    if place > at and place <= last then
      at = place
      n = n + 1
      rights[n], hashes[n] = at, sub(packed, at * 8 + 1, at * 8 + 8)
    end
  end
  if n == 0 then
    local most = math.floor(ROUND / stride)
    local probes = math.max(4, math.floor(most * math.min(1, WIDE_BYTES / (cost - FIELD_BYTES))))
    while n < probes and at < last do
      at = math.min(at + stride, last)
      n = n + 1
      rights[n], hashes[n] = at, sub(packed, at * 8 + 1, at * 8 + 8)
    end
  end
  return rights, n, next_guess
end

-- Returns the intervals between `left` and these probes whose ends differ, from left to right: {low...}, {high...}, {value at
-- low...}, {value at high...}, how many; and the new `left` with its value: the last probe, or the first one without a holder.
local function intervals_between(left, left_value, rights, found, n)
  local lows, highs, low_values, high_values, open = {}, {}, {}, {}, 0
  for i = 1, n do
    local right, value = rights[i], found[i]
    if value ~= left_value then
      open = open + 1
      lows[open], highs[open], low_values[open], high_values[open] = left, right, left_value, value
    end
    left, left_value = right, value
    if not value then
      break
    end
  end
  return lows, highs, low_values, high_values, open, left, left_value
end

-- Reads the middles of all intervals. Returns how many middles there are, and the halves whose ends differ. `hashes` is filled.
local function halve(blocks, packed, lows, highs, low_values, high_values, open, hashes)
  local n, sub = 0, string.sub
  for i = 1, open do
    local low, high = lows[i], highs[i]
    if high - low > 1 then
      local middle = (low + high - (low + high) % 2) * 4
      n = n + 1
      hashes[n] = sub(packed, middle + 1, middle + 8)
    end
  end
  if n == 0 then
    return 0, lows, highs, low_values, high_values, open
  end
  local found, j, k = read_values(blocks, hashes, n), 0, 0
  local next_lows, next_highs, next_low_values, next_high_values = {}, {}, {}, {}
  for i = 1, open do
    local low, high, low_value, high_value = lows[i], highs[i], low_values[i], high_values[i]
    if high - low > 1 then
      local middle = (low + high - (low + high) % 2) / 2
      j = j + 1
      local value = found[j]
      if value ~= low_value then
        k = k + 1
        next_lows[k], next_highs[k], next_low_values[k], next_high_values[k] = low, middle, low_value, value
      end
      low, low_value = value and middle or high, value -- the middle has no holder, so nothing after it counts
    end
    if low < high and low_value ~= high_value then
      k = k + 1
      next_lows[k], next_highs[k], next_low_values[k], next_high_values[k] = low, high, low_value, high_value
    end
  end
  return n, next_lows, next_highs, next_low_values, next_high_values, k
end

-- Returns how many of the first intervals have at most MOST_OPEN middles.
local function first_open(lows, highs, open)
  local middles = 0
  for i = 1, open do
    if highs[i] - lows[i] > 1 then
      middles = middles + 1
      if middles > MOST_OPEN then
        return i - 1
      end
    end
  end
  return open
end

-- Returns the runs of equal values as {start...} and {value...}; the first block without a holder (`count` if all have one);
-- and the block from which on the caller has to ask again (nil: it need not). `guess`: the blocks to be probed first,
-- ascending.
local function gallop(blocks, packed, count, stride, guess)
  local left, left_value = 0, redis.call('HGET', blocks, string.sub(packed, 1, 8))
  if not left_value then
    return {}, {}, 0
  end
  local starts, values, runs, spent, next_guess, last = { 0 }, { left_value }, 1, 0, 1, count - 1
  local hashes = {} -- the hashes of the blocks that a level reads; one table is used for all levels
  while left < last do
    if spent > BYTES then
      if starts[runs] == left then
        starts[runs], values[runs] = nil, nil
      end
      return starts, values, left, left
    end
    local cost = FIELD_BYTES + #left_value -- values only get shorter
    local rights, read, lows, highs, low_values, high_values, open
    rights, read, next_guess = next_probes(packed, left, last, stride, guess, next_guess, cost, hashes)
    spent = spent + read * cost
    local found = read_values(blocks, hashes, read)
    lows, highs, low_values, high_values, open, left, left_value = intervals_between(left, left_value, rights, found, read)
    while open > 0 and read > 0 do
      local kept = first_open(lows, highs, open)
      if kept < open then
        open, left, left_value = kept, highs[kept], high_values[kept]
      end
      read, lows, highs, low_values, high_values, open =
        halve(blocks, packed, lows, highs, low_values, high_values, open, hashes)
      spent = spent + read * cost
    end
    for i = 1, open do
      local value = high_values[i]
      if not value then
        return starts, values, highs[i]
      end
      runs = runs + 1
      starts[runs], values[runs] = highs[i], value
    end
  end
  return starts, values, count
end

-- Returns the same as gallop does, but by reading every block.
local function walk(blocks, packed, count)
  local starts, values, previous, bytes = {}, {}, nil, 0
  for first = 0, count - 1, WALKED do
    if bytes > BYTES then
      return starts, values, first, first
    end
    local last = math.min(first + WALKED, count) - 1
    local found = redis.call('HMGET', blocks, unpack(split(string.sub(packed, first * 8 + 1, last * 8 + 8))))
    for i = 1, #found do
      local value = found[i]
      if not value then
        return starts, values, first + i - 1
      end
      bytes = bytes + FIELD_BYTES + #value
      if value ~= previous then
        starts[#starts + 1], values[#values + 1] = first + i - 1, value
        previous = value
      end
    end
  end
  return starts, values, count
end

-- overlap: runs of equal holders values along a chain, up to the first block without a holder, and where the marked holders
-- among them can resume it.
--
-- KEYS 1 blocks of the scope
--      2 meta
--      3 marked
--      4 marks of the scope
-- ARGV 1 packed hashes
--      2 stride (0: read every block)
--      3 index of the first hash in its chain, a multiple of SEGMENT; '': don't look at marks
--      4 the highest position to resume at, in blocks from the chain's start
--      5 guesses where runs begin and end: indices in ARGV 1 (u32 BE), ascending; may be absent
-- returns {version of the active holders (see active.lua), {value...}, {run length...}, reach, left, next}
--   reach: 3-byte number and position (u32 BE; 0: none) of each marked holder of the first block
--   left: 3-byte number and index (u32 BE) of the marked holders that are missing in `reach`, to be passed to `kvatlas_resume`:
--     none of the marks below that index was looked at
--   next: the index in ARGV 1 from which on the hashes were not looked at, so that another call has to; 0: all were
register_read_only('kvatlas_overlap', function(keys, args)
  local blocks, meta, packed, stride = keys[1], keys[2], args[1], integer(args[2], 0, MOST_STRIDE)
  local count = math.floor(#packed / 8)
  local version = redis.call('HGET', meta, 'active') or '0'
  if count == 0 then
    return { version, {}, {}, '', '', 0 }
  end
  local starts, values, stop, next_index
  if stride == 0 then
    starts, values, stop, next_index = walk(blocks, packed, count)
  else
    local places = math.floor(#(args[5] or '') / 4)
    local guess = places > 0 and { struct.unpack('>' .. string.rep('I4', math.min(places, CHUNK)), args[5]) } or {}
    guess[#guess] = nil -- struct.unpack returns the next position too
    starts, values, stop, next_index = gallop(blocks, packed, count, stride, guess)
  end
  local reach, left = '', ''
  if args[3] ~= '' and starts[1] and redis.call('HLEN', keys[3]) > 0 then
    local first, limit = integer(args[3], 0), integer(args[4], 0)
    local names, belows = marked_in(values[1], keys[3]), {}
    if next_index or #names > HOLDERS then -- separate calls do that
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
end, 5, MOST_CHAIN)
