-- scope: the full text behind a scope id; the first one written stays.
-- KEYS: scopes   ARGV: scope id, canonical text, and so on   returns the texts that are stored
redis.register_function({
  function_name = 'kvatlas_scope',
  callback = function(keys, args)
    local stored = {}
    for i = 1, #args, 2 do
      redis.call('HSETNX', keys[1], args[i], args[i + 1])
      stored[#stored + 1] = redis.call('HGET', keys[1], args[i])
    end
    return stored
  end,
  flags = { 'allow-oom' },
})
