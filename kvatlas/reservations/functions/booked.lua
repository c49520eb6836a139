-- booked: finds out which of these reservations exist. One that has just ended may still be among them.
--
-- KEYS see _layout.lua
-- ARGV ids
-- returns 1 for each; 0 if there is no such reservation
register_read_only('kvatlas_pool_booked', function(keys, args)
  local found = {}
  for i = 1, #args do
    found[i] = redis.call('HEXISTS', keys[RESERVATIONS], args[i])
  end
  return found
end)
