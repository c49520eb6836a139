-- answered: what a router counts of answers, kept for a while after it last told them; of too many routers the one that ends
--   first goes. Read with HGETALL (kvatlas/predictions/store.py).
-- KEYS: answers   HASH  router id -> "<us at which it ends> <packed report>"
-- ARGV: router id, us to keep it, most routers, packed report
register('kvatlas_pool_answered', function(keys, args)
  local now, keep_us, most = now_us(), tonumber(args[2]), tonumber(args[3])
  redis.call('HSET', keys[1], args[1], string.format('%d ', now + keep_us) .. args[4])
  redis.call('PEXPIRE', keys[1], string.format('%d', math.ceil(keep_us / 1000)))
  local live, first, first_ends, flat = 0, nil, math.huge, redis.call('HGETALL', keys[1])
  for i = 1, #flat, 2 do
    local ends = tonumber(string.match(flat[i + 1], '^%d+'))
    if ends <= now then
      redis.call('HDEL', keys[1], flat[i])
    else
      live = live + 1
      if ends < first_ends then
        first, first_ends = flat[i], ends
      end
    end
  end
  if live > most then
    redis.call('HDEL', keys[1], first)
  end
  return 0
end)
