-- release: frees the numbers that are retired and hold nothing any more.
-- KEYS: holders, retired, digests, touched, free   ARGV: holder...   returns how many retired holders are left
redis.register_function({
  function_name = 'kvatlas_release',
  callback = function(keys, args)
    local now = now_ms()
    for i = 1, #args do
      local holder = args[i]
      if redis.call('SISMEMBER', keys[2], holder) == 1 and digest_blocks(read_digest(keys[3], holder)) == 0 then
        redis.call('SREM', keys[2], holder)
        redis.call('HDEL', keys[1], holder)
        redis.call('HDEL', keys[3], holder)
        redis.call('HDEL', keys[4], holder)
        redis.call('RPUSH', keys[5], holder .. string.format('%d', now))
      end
    end
    return redis.call('SCARD', keys[2])
  end,
  flags = { 'allow-oom' },
})
