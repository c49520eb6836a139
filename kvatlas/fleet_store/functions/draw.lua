-- draw: takes from clients' allowances, which refill continuously, and puts back what was taken but not used. An allowance that
-- is not in the store is full.
--
-- KEYS allowances, at most 256   HASH  left -> amount, below 0 if more was used than taken; at -> ms of the store's clock
-- ARGV for each:
--      its size: the maximum, and what refills in a minute
--      what is put back; below 0: what was used without being taken
--      what is wanted
-- returns for each: taken, left
local MOST_ALLOWANCES, MOST_DEBT, MINUTE_MS = 256, 10, 60000

-- Returns how much is left of an allowance now.
local function left_of(key, size, now)
  local found = redis.call('HMGET', key, 'left', 'at')
  local left, at = tonumber(found[1]), tonumber(found[2])
  if not (left and at and left == left and at == at) then
    return size
  end
  return math.min(size, left + math.max(0, now - at) * size / MINUTE_MS)
end

register('kvatlas_fleet_draw', function(keys, args)
  if #keys > MOST_ALLOWANCES or #args ~= 3 * #keys then
    error({ err = 'ERR arguments: expected three for each of at most 256 allowances' })
  end
  local now, out = now_ms(), {}
  for i, key in ipairs(keys) do
    local size, back = integer(args[3 * i - 2], 1), integer(args[3 * i - 1], -MOST_NUMBER)
    local wanted = integer(args[3 * i], 0)
    local left = math.max(-MOST_DEBT * size, math.min(size, left_of(key, size, now) + back))
    local taken = math.max(0, math.min(wanted, math.floor(left)))
    left = left - taken
    redis.call('HSET', key, 'left', string.format('%.3f', left), 'at', string.format('%d', now))
    redis.call('PEXPIRE', key, string.format('%d', (size - left) * MINUTE_MS / size + 1000))
    out[#out + 1] = taken
    out[#out + 1] = math.floor(left)
  end
  return out
end)
