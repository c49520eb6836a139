-- overlap: who holds how many leading blocks of a chain.
-- Residency is prefix-closed, so along a chain the active holders only get fewer: equal values at two places mean equal
-- active holders between them. Probes every `stride` blocks, then bisection, level by level, only where probes differ.

-- Appends the runs that start in (left, right]; returns the first block that nobody holds, if it is among them.
-- Few lost holders: bisects for where they went. Many: looks at every block between, which is less work then.
local function between(blocks, packed, left, left_value, right, right_value, starts, values)
  if right == left + 1 then
    if not right_value then
      return right
    end
    starts[#starts + 1], values[#values + 1] = right, right_value
    return nil
  end
  local lost = (#left_value - (right_value and #right_value or 0)) / 4
  if lost < 0 or lost > 3 then
    local found = redis.call('HMGET', blocks, unpack(split(string.sub(packed, left * 8 + 9, right * 8 + 8))))
    local previous = left_value
    for i = 1, #found do
      local value = found[i]
      if value ~= previous then
        if not value then
          return left + i
        end
        starts[#starts + 1], values[#values + 1] = left + i, value
        previous = value
      end
    end
    return nil
  end
  local middle = math.floor((left + right) / 2)
  local value = redis.call('HGET', blocks, string.sub(packed, middle * 8 + 1, middle * 8 + 8))
  if value ~= left_value then
    local stop = between(blocks, packed, left, left_value, middle, value, starts, values)
    if stop then
      return stop
    end
  end
  if value ~= right_value then
    return between(blocks, packed, middle, value, right, right_value, starts, values)
  end
  return nil
end

-- Runs of equal values: {start...}, {value...}, and the first block that nobody holds (count where there is none).
local function gallop(blocks, packed, count, stride)
  local left, left_value = 0, redis.call('HGET', blocks, string.sub(packed, 1, 8))
  if not left_value then
    return {}, {}, 0
  end
  local starts, values = { 0 }, { left_value }
  while left < count - 1 do
    local probes, n, at = {}, 0, left
    while n < 64 and at < count - 1 do
      at = math.min(at + stride, count - 1)
      n = n + 1
      probes[n] = string.sub(packed, at * 8 + 1, at * 8 + 8)
    end
    local found = redis.call('HMGET', blocks, unpack(probes))
    for i = 1, n do
      local right, value = math.min(left + stride, count - 1), found[i]
      if value ~= left_value then
        local stop = between(blocks, packed, left, left_value, right, value, starts, values)
        if stop then
          return starts, values, stop
        end
      end
      left, left_value = right, value
    end
  end
  return starts, values, count
end

-- The same from a look at every block.
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

-- KEYS: blocks of the scope, meta   ARGV: packed hashes, stride (0: walk every block)
-- returns the version of the active holders (see kvatlas_active), {value...}, {run length...}
redis.register_function({
  function_name = 'kvatlas_overlap',
  callback = function(keys, args)
    local packed, stride = args[1], tonumber(args[2])
    local count = #packed / 8
    local version = redis.call('HGET', keys[2], 'active') or '0'
    if count == 0 then
      return { version, {}, {} }
    end
    local starts, values, stop
    if stride == 0 then
      starts, values, stop = walk(keys[1], packed, count)
    else
      starts, values, stop = gallop(keys[1], packed, count, stride)
    end
    for i = 1, #starts do -- starts become lengths
      starts[i] = (starts[i + 1] or stop) - starts[i]
    end
    return { version, values, starts }
  end,
  flags = { 'no-writes' },
})
