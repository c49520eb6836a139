-- beat: renews a router's lease. Its reservations live as long as the lease.
--
-- KEYS see _layout.lua
-- ARGV 1 router id
--      2 us of the lease, from now on
-- returns 1; 0 if there was no lease, or it was over, so that the reservations made under it are gone
register('kvatlas_pool_beat', function(keys, args)
  local router, lease_us, now = args[1], integer(args[2], 0), now_us()
  local _, lived = renew_lease(keys, router, lease_us, now)
  purge(keys, now)
  expire_without_workers(keys)
  return lived and 1 or 0
end)
