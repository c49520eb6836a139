-- Leases of routers: a router's reservations live as long as its lease.

-- beat: renews a router's lease.
--
-- KEYS see _pool.lua
-- ARGV 1 router id
--      2 us of the lease, from now on
-- returns 1; 0 if there was no lease, or it was over and the reservations made under it are gone
register('kvatlas_pool_beat', function(keys, args)
  local router, lease_us, now = args[1], tonumber(args[2]), now_us()
  purge(keys, now)
  local lived = redis.call('HEXISTS', keys[ROUTERS], router)
  redis.call('HSET', keys[ROUTERS], router, string.format('%d', now + lease_us))
  expire_without_workers(keys)
  return lived
end)

-- leave: ends a router's lease, and with it its reservations.
--
-- KEYS see _pool.lua
-- ARGV 1 router id
-- returns 0
register('kvatlas_pool_leave', function(keys, args)
  local router = args[1]
  drop_router(keys, router, now_us())
  return 0
end)
