-- The registry of scopes: the full text behind each id, and when a message last used it.

-- scope: registers scopes; of each id the first text written stays.
--
-- KEYS 1 scopes
--      2 scope uses
-- ARGV scope id, canonical text, scope id, canonical text...
-- returns the texts that are stored, in order
register_always('kvatlas_scope', function(keys, args)
  local scopes, uses, stored, now = keys[1], keys[2], {}, string.format('%d', now_ms())
  for i = 1, #args, 2 do
    local scope_id, text = args[i], args[i + 1]
    redis.call('HSETNX', scopes, scope_id, text)
    redis.call('ZADD', uses, now, scope_id)
    stored[#stored + 1] = redis.call('HGET', scopes, scope_id)
  end
  return stored
end)

-- scopes_idle: scopes that were not registered for some time.
--
-- KEYS 1 scope uses
-- ARGV 1 the time, ms
--      2 how many at most
-- returns {scope id...}
register_read_only('kvatlas_scopes_idle', function(keys, args)
  local uses, idle_ms, most = keys[1], args[1], args[2]
  return redis.call('ZRANGEBYSCORE', uses, '-inf', string.format('%d', now_ms() - idle_ms), 'LIMIT', 0, most)
end)

-- scopes_used: counts these scopes as used now, although no message used them: they have blocks.
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

-- scopes_forget: drops these scopes, unless they were registered meanwhile.
--
-- KEYS 1 scopes
--      2 scope uses
-- ARGV 1 ms for which they must not have been registered
--      2... scope ids
-- returns how many it dropped
register_always('kvatlas_scopes_forget', function(keys, args)
  local scopes, uses, before, dropped = keys[1], keys[2], now_ms() - args[1], 0
  for i = 2, #args do
    local scope_id = args[i]
    local used = redis.call('ZSCORE', uses, scope_id)
    if used and tonumber(used) <= before then
      dropped = dropped + redis.call('HDEL', scopes, scope_id)
      redis.call('ZREM', uses, scope_id)
    end
  end
  return dropped
end)
