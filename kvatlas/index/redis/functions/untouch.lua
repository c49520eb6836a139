-- untouch: takes scopes that the shard holds no block of out of holders' lists of the scopes that they used, some holders a
-- call: nothing of them is there to be swept.
-- KEYS: touched, blocks of each scope   ARGV: cursor, count, scope id...
-- returns {next cursor, scope id of those with blocks...}
redis.register_function({
  function_name = 'kvatlas_untouch',
  callback = function(keys, args)
    local gone, any, held = {}, false, {}
    for i = 3, #args do
      if redis.call('EXISTS', keys[i - 1]) == 1 then
        held[#held + 1] = args[i]
      else
        gone[args[i]] = true
        any = true
      end
    end
    if not any then
      return { '0', unpack(held) }
    end
    local answer = redis.call('HSCAN', keys[1], args[1], 'COUNT', args[2])
    local flat = answer[2]
    for i = 1, #flat, 2 do
      local touched, rest = flat[i + 1], {}
      for at = 1, #touched, 16 do
        if not gone[string.sub(touched, at, at + 7)] then
          rest[#rest + 1] = string.sub(touched, at, at + 15)
        end
      end
      if #rest == 0 then
        redis.call('HDEL', keys[1], flat[i])
      elseif #rest * 16 ~= #touched then
        redis.call('HSET', keys[1], flat[i], table.concat(rest))
      end
    end
    return { answer[1], unpack(held) }
  end,
  flags = { 'allow-oom' },
})
