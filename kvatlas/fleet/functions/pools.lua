-- pools: these pools have workers.
-- KEYS: pools   ARGV: pool id...
register('kvatlas_fleet_pools', function(keys, args)
  redis.call('SADD', keys[1], unpack(args))
  return {}
end)

-- no_pool: this pool has none any more.
-- KEYS: pools   ARGV: pool id
register('kvatlas_fleet_no_pool', function(keys, args)
  redis.call('SREM', keys[1], args[1])
  return {}
end)
