-- active: the active holders' numbers and workers, and their version: it changes whenever a holder becomes active or ceases
-- to be, so a client asks again only then.
-- KEYS: active, meta   returns the version, {3-byte number, worker id...}
redis.register_function({
  function_name = 'kvatlas_active',
  callback = function(keys, args)
    return { redis.call('HGET', keys[2], 'active') or '0', redis.call('HGETALL', keys[1]) }
  end,
  flags = { 'no-writes' },
})
