-- Replicas of the indexer: who lives.

-- beat: this member lives until now + ttl; returns all live members. Members whose time is over are taken out. One that would
-- live longer than this one was there before the clock went back, and lives as long.
-- KEYS: members   ARGV: member id, ttl ms
register('kvatlas_fleet_beat', function(keys, args)
  local now = now_ms()
  local last = now + tonumber(args[2])
  redis.call('HSET', keys[1], args[1], string.format('%d', last))
  local live, flat = {}, redis.call('HGETALL', keys[1])
  for i = 1, #flat, 2 do
    local expiry = tonumber(flat[i + 1])
    if expiry > now then
      live[#live + 1] = flat[i]
      if expiry > last then
        redis.call('HSET', keys[1], flat[i], string.format('%d', last))
      end
    else
      redis.call('HDEL', keys[1], flat[i])
    end
  end
  return live
end)

-- leave: the member and all its leases are gone.
-- KEYS: members, leases   ARGV: member id
register('kvatlas_fleet_leave', function(keys, args)
  redis.call('HDEL', keys[1], args[1])
  local flat = redis.call('HGETALL', keys[2])
  for i = 1, #flat, 2 do
    if string.match(flat[i + 1], '^%d+ (.*)$') == args[1] then
      redis.call('HDEL', keys[2], flat[i])
    end
  end
  return {}
end)
