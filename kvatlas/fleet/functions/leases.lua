-- Leases of partitions: value "<expiry ms> <member id>".

-- Its member and when it ends; nil where it has expired.
local function holder_of(value, now)
  if not value then
    return nil
  end
  local expiry, member = string.match(value, '^(%d+) (.*)$')
  if tonumber(expiry) <= now then
    return nil
  end
  return member, tonumber(expiry)
end

-- claim: take or renew what is free, expired or one's own; returns the partitions held. A lease that ends later than one
-- taken now is of before the clock went back, and ends then.
-- KEYS: leases   ARGV: member id, ttl ms, partition...
register('kvatlas_fleet_claim', function(keys, args)
  local now, held = now_ms(), {}
  local last = now + tonumber(args[2])
  local mine = string.format('%d %s', last, args[1])
  for i = 3, #args do
    local member, expiry = holder_of(redis.call('HGET', keys[1], args[i]), now)
    if member == nil or member == args[1] then
      redis.call('HSET', keys[1], args[i], mine)
      held[#held + 1] = args[i]
    elseif expiry > last then
      redis.call('HSET', keys[1], args[i], string.format('%d %s', last, member))
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
