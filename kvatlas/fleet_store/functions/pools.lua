-- pools: adds pools that have workers.
--
-- KEYS 1 pools
-- ARGV pool id...
-- returns {}
register('kvatlas_fleet_pools', function(keys, args)
  redis.call('SADD', keys[1], unpack(args))
  return {}
end)
