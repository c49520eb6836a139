-- no_pool: removes a pool that no longer has workers.
--
-- KEYS 1 pools
-- ARGV 1 pool id
-- returns {}
register('kvatlas_fleet_no_pool', function(keys, args)
  local pools, pool_id = keys[1], args[1]
  redis.call('SREM', pools, pool_id)
  return {}
end)
