-- Leases of routers: a router's reservations live as long as its lease.

-- beat: renews a router's lease.
--
-- KEYS see _layout.lua
-- ARGV 1 router id
--      2 us of the lease, from now on
-- returns 1; 0 if there was no lease, or it was over and the reservations made under it are gone
register('kvatlas_pool_beat', function(keys, args)
  local router, lease_us, now = args[1], tonumber(args[2]), now_us()
  local _, lived = renew_lease(keys, router, lease_us, now)
  purge(keys, now)
  expire_without_workers(keys)
  return lived and 1 or 0
end)

-- leave: ends a router's lease, and with it its reservations. What is left is removed by the next calls, this one again too.
--
-- KEYS see _layout.lua
-- ARGV 1 router id
-- returns 1 if there may be more to remove, otherwise 0
register('kvatlas_pool_leave', function(keys, args)
  end_lease(keys, args[1])
  return purge(keys, now_us())
end)
