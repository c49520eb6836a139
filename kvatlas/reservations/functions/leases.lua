-- Leases of routers: a router's reservations live as long as its lease.

-- beat: the router lives for so long from now.
-- KEYS: see _pool.lua   ARGV: router id, us of the lease
-- returns 1; 0 where the lease was over or new, so that reservations made under it are gone
register('kvatlas_pool_beat', function(keys, args)
  local now = now_us()
  purge(keys, now)
  local lived = redis.call('HEXISTS', keys[ROUTERS], args[1])
  redis.call('HSET', keys[ROUTERS], args[1], string.format('%d', now + tonumber(args[2])))
  keep_shortly(keys)
  return lived
end)

-- leave: the router and all its reservations are gone.
-- KEYS: see _pool.lua   ARGV: router id
register('kvatlas_pool_leave', function(keys, args)
  drop_router(keys, args[1], now_us())
  return 0
end)
