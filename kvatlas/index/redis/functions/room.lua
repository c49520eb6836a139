-- room: the memory of the server that holds this shard.
-- KEYS: meta   returns {bytes used, maxmemory (0: no limit), maxmemory-policy}
redis.register_function({
  function_name = 'kvatlas_room',
  callback = function(keys, args)
    local told = redis.call('INFO', 'memory')
    return {
      tonumber(string.match(told, 'used_memory:(%d+)')), tonumber(string.match(told, 'maxmemory:(%d+)')),
      string.match(told, 'maxmemory_policy:([%w-]+)') or '',
    }
  end,
  flags = { 'no-writes' },
})
