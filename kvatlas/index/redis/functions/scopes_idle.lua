-- scopes_idle: the scopes that have not been registered for some time.
--
-- KEYS 1 scope uses
-- ARGV 1 the time, ms
--      2 the most to return
-- returns {scope id...}
register_read_only('kvatlas_scopes_idle', function(keys, args)
  local uses, idle_ms, most = keys[1], integer(args[1], 0), integer(args[2], 0, 1000)
  return redis.call('ZRANGEBYSCORE', uses, '-inf', string.format('%d', now_ms() - idle_ms), 'LIMIT', 0, most)
end)
