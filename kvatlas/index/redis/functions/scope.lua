-- scope: the full text behind a scope id; the first one written stays. When it was last told is remembered.
-- KEYS: scopes, scope uses   ARGV: scope id, canonical text, and so on   returns the texts that are stored
redis.register_function({
  function_name = 'kvatlas_scope',
  callback = function(keys, args)
    local stored, now = {}, string.format('%d', now_ms())
    for i = 1, #args, 2 do
      redis.call('HSETNX', keys[1], args[i], args[i + 1])
      redis.call('ZADD', keys[2], now, args[i])
      stored[#stored + 1] = redis.call('HGET', keys[1], args[i])
    end
    return stored
  end,
  flags = { 'allow-oom' },
})

-- scopes_idle: scopes that nobody told for so long.
-- KEYS: scope uses   ARGV: ms, how many at most   returns {scope id...}
redis.register_function({
  function_name = 'kvatlas_scopes_idle',
  callback = function(keys, args)
    local before = string.format('%d', now_ms() - args[1])
    return redis.call('ZRANGEBYSCORE', keys[1], '-inf', before, 'LIMIT', 0, args[2])
  end,
  flags = { 'no-writes' },
})

-- scopes_used: these are in use, whoever tells of them or not.
-- KEYS: scope uses   ARGV: scope id...
redis.register_function({
  function_name = 'kvatlas_scopes_used',
  callback = function(keys, args)
    local now = string.format('%d', now_ms())
    for i = 1, #args do
      redis.call('ZADD', keys[1], 'XX', now, args[i])
    end
    return 0
  end,
  flags = { 'allow-oom' },
})

-- scopes_forget: drops these scopes, unless somebody told of them meanwhile.
-- KEYS: scopes, scope uses   ARGV: ms, scope id...   returns how many
redis.register_function({
  function_name = 'kvatlas_scopes_forget',
  callback = function(keys, args)
    local before, gone = now_ms() - args[1], 0
    for i = 2, #args do
      local used = redis.call('ZSCORE', keys[2], args[i])
      if used and tonumber(used) <= before then
        gone = gone + redis.call('HDEL', keys[1], args[i])
        redis.call('ZREM', keys[2], args[i])
      end
    end
    return gone
  end,
  flags = { 'allow-oom' },
})
