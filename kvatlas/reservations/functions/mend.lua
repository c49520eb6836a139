-- mend: repairs a pool in which a function that may only read found damage.
--
-- KEYS see _layout.lua
-- ARGV 1 what is damaged
-- returns 0
register('kvatlas_pool_mend', function(keys, args)
  repair(keys, args[1])
  return 0
end)
