-- release: frees the numbers that are retired and hold nothing any more.
-- KEYS: holders, retired, digests, touched, free   ARGV: proven, and for each number it and its entry in holders as it was
--   before the scan   returns how many retired holders are left
-- proven 1: one server's whole scan has found nothing of these holders, so a count that is not zero is itself wrong (damage
-- that no message did), unless the number was freed and given out again meanwhile.
redis.register_function({
  function_name = 'kvatlas_release',
  callback = function(keys, args)
    local now = now_ms()
    for i = 2, #args, 2 do
      local holder = args[i]
      local scanned = args[1] == '1' and (redis.call('HGET', keys[1], holder) or '') == args[i + 1]
      local empty = scanned or digest_blocks(read_digest(keys[3], holder)) == 0
      if empty and redis.call('SISMEMBER', keys[2], holder) == 1 then
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
