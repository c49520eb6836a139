-- Leases of partitions: value "<expiry ms> <member id>".

local function holder_of(value, now)
  if not value then
    return nil
  end
  local expiry, member = string.match(value, '^(%d+) (.*)$')
  if tonumber(expiry) <= now then
    return nil
  end
  return member
end

-- claim: take or renew what is free, expired or one's own; returns the partitions held.
-- KEYS: leases   ARGV: member id, ttl ms, partition...
register('kvatlas_fleet_claim', function(keys, args)
  local now, held = now_ms(), {}
  local value = string.format('%d %s', now + tonumber(args[2]), args[1])
  for i = 3, #args do
    local member = holder_of(redis.call('HGET', keys[1], args[i]), now)
    if member == nil or member == args[1] then
      redis.call('HSET', keys[1], args[i], value)
      held[#held + 1] = args[i]
    end
  end
  return held
end)

-- release: give up what is one's own.
-- KEYS: leases   ARGV: member id, partition...
register('kvatlas_fleet_release', function(keys, args)
  for i = 2, #args do
    local value = redis.call('HGET', keys[1], args[i])
    if value and string.match(value, '^%d+ (.*)$') == args[1] then
      redis.call('HDEL', keys[1], args[i])
    end
  end
  return {}
end)

-- leases: flat list of partition, member for all that have not expired.
-- KEYS: leases
register('kvatlas_fleet_leases', function(keys, args)
  local now, out, flat = now_ms(), {}, redis.call('HGETALL', keys[1])
  for i = 1, #flat, 2 do
    local member = holder_of(flat[i + 1], now)
    if member then
      out[#out + 1] = flat[i]
      out[#out + 1] = member
    end
  end
  return out
end)
