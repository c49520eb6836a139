-- beat: makes a member (an indexer process) expire `ttl ms` from now. Removes expired members. If another member would expire
-- later than this one, its expiry was set before the store's clock went back, and is shortened to the same time.
--
-- KEYS 1 members   HASH  member id -> expiry ms
-- ARGV 1 member id
--      2 ttl ms
-- returns all live members
register('kvatlas_fleet_beat', function(keys, args)
  local members, member, ttl_ms, now, live = keys[1], args[1], integer(args[2], 0), now_ms(), {}
  local last = now + ttl_ms
  redis.call('HSET', members, member, string.format('%d', last))
  local flat = redis.call('HGETALL', members)
  for i = 1, #flat, 2 do
    local other, expiry = flat[i], tonumber(flat[i + 1])
    if expiry > now then
      live[#live + 1] = other
      if expiry > last then
        redis.call('HSET', members, other, string.format('%d', last))
      end
    else
      redis.call('HDEL', members, other)
    end
  end
  return live
end)
