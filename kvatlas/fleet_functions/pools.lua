-- pools: these pools have workers.
-- KEYS: pools   ARGV: pool id...
register('kvatlas_fleet_pools', function(keys, args)
  redis.call('SADD', keys[1], unpack(args))
  return {}
end)
