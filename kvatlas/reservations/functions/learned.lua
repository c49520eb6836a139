-- learned: the evidence of every worker, see learn.lua.
--
-- KEYS see _layout.lua
-- returns {worker, cmsgpack evidence...}
register_read_only('kvatlas_pool_learned', function(keys)
  return redis.call('HGETALL', keys[RATES])
end)
