-- leave: ends a router's lease and its reservations. If there are many, later calls of any function remove the rest.
--
-- KEYS see _layout.lua
-- ARGV 1 router id
-- returns 1 if there may be more to remove, otherwise 0
register('kvatlas_pool_leave', function(keys, args)
  end_lease(keys, args[1])
  return purge(keys, now_us())
end)
