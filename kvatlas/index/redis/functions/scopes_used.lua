-- scopes_used: marks these scopes as used now, although no message used them, because they have blocks.
--
-- KEYS 1 scope uses
-- ARGV scope id...
-- returns 0
register_always('kvatlas_scopes_used', function(keys, args)
  local uses, now = keys[1], string.format('%d', now_ms())
  for i = 1, #args do
    redis.call('ZADD', uses, 'XX', now, args[i])
  end
  return 0
end)
