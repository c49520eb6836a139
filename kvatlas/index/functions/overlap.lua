-- overlap: who holds how many leading blocks of a chain.
-- Residency is prefix-closed, so along a chain the active holders only get fewer: equal values at two places mean equal
-- active holders between them. Probes every `stride` blocks, then bisection, level by level, only where probes differ.

-- Values at the given ascending block indices (from 0), in few calls.
local function values_at(blocks, packed, indices)
  local out = {}
  for first = 1, #indices, CHUNK do
    local last = math.min(first + CHUNK - 1, #indices)
    local fields = {}
    for i = first, last do
      fields[i - first + 1] = string.sub(packed, indices[i] * 8 + 1, indices[i] * 8 + 8)
    end
    local values = redis.call('HMGET', blocks, unpack(fields))
    for i = 1, #fields do
      out[first + i - 1] = values[i]
    end
  end
  return out
end

-- Boundaries: ascending starts of runs and the value of each start; `stop` is the first block that nobody holds.
local function gallop(blocks, packed, count, stride)
  local start_value = redis.call('HGET', blocks, string.sub(packed, 1, 8))
  if not start_value then
    return {}, {}, 0
  end
  local starts, value_of, stop = { 0 }, { [0] = start_value }, count
  local left, left_value = 0, start_value
  local open = {} -- intervals {left, left value, right, right value} whose ends differ
  local next_probe = math.min(stride, count - 1)
  while left < count - 1 do
    local probes = {}
    while #probes < 64 and next_probe <= count - 1 do
      probes[#probes + 1] = next_probe
      if next_probe == count - 1 then
        break
      end
      next_probe = math.min(next_probe + stride, count - 1)
    end
    local values = values_at(blocks, packed, probes)
    for i = 1, #probes do
      if values[i] ~= left_value then
        open[#open + 1] = { left, left_value, probes[i], values[i] }
      end
      left, left_value = probes[i], values[i]
      if not left_value then
        break
      end
    end
    if not left_value then
      break
    end
  end
  while #open > 0 do
    local middles, halves = {}, {}
    for i = 1, #open do
      local interval = open[i]
      if interval[1] < stop then
        if interval[3] == interval[1] + 1 then
          if interval[4] then
            starts[#starts + 1] = interval[3]
            value_of[interval[3]] = interval[4]
          elseif interval[3] < stop then
            stop = interval[3]
          end
        else
          middles[#middles + 1] = math.floor((interval[1] + interval[3]) / 2)
          halves[#halves + 1] = interval
        end
      end
    end
    open = {}
    local values = values_at(blocks, packed, middles)
    for i = 1, #middles do
      local interval, middle, value = halves[i], middles[i], values[i]
      if interval[2] ~= value then
        open[#open + 1] = { interval[1], interval[2], middle, value }
      end
      if value and value ~= interval[4] then
        open[#open + 1] = { middle, value, interval[3], interval[4] }
      end
    end
  end
  table.sort(starts)
  return starts, value_of, stop
end

-- The same from a look at every block.
local function walk(blocks, packed, count)
  local starts, value_of, previous = {}, {}, nil
  for first = 0, count - 1, CHUNK do
    local last = math.min(first + CHUNK, count) - 1
    local values = redis.call('HMGET', blocks, unpack(split(string.sub(packed, first * 8 + 1, last * 8 + 8))))
    for i = 1, #values do
      local value = values[i]
      if not value then
        return starts, value_of, first + i - 1
      end
      if value ~= previous then
        starts[#starts + 1] = first + i - 1
        value_of[first + i - 1] = value
        previous = value
      end
    end
  end
  return starts, value_of, count
end

-- KEYS: blocks of the scope, active   ARGV: packed hashes, stride (0: walk every block)
-- returns {value...}, {run length...}, {3-byte number, worker id...} of the active holders in the first value
redis.register_function({
  function_name = 'kvatlas_overlap',
  callback = function(keys, args)
    local packed, stride = args[1], tonumber(args[2])
    local count = #packed / 8
    if count == 0 then
      return { {}, {}, {} }
    end
    local starts, value_of, stop
    if stride == 0 then
      starts, value_of, stop = walk(keys[1], packed, count)
    else
      starts, value_of, stop = gallop(keys[1], packed, count, stride)
    end
    local values, lengths, names = {}, {}, {}
    for i = 1, #starts do
      if starts[i] >= stop then
        break
      end
      values[i] = value_of[starts[i]]
      lengths[i] = math.min(starts[i + 1] or stop, stop) - starts[i]
    end
    if #values > 0 then
      local numbers = {}
      for at = 1, #values[1], 4 do
        numbers[#numbers + 1] = string.sub(values[1], at, at + 2)
      end
      for first = 1, #numbers, CHUNK do
        local last = math.min(first + CHUNK - 1, #numbers)
        local workers = redis.call('HMGET', keys[2], unpack(numbers, first, last))
        for i = first, last do
          if workers[i - first + 1] then
            names[#names + 1] = numbers[i]
            names[#names + 1] = workers[i - first + 1]
          end
        end
      end
    end
    return { values, lengths, names }
  end,
  flags = { 'no-writes' },
})
