-- Workers as the owner of their partition tells them.

-- report: fleet records and load samples. Bookings made before a sample (by the time that a request may travel) are in it.
-- Another incarnation ends all that was booked on a worker and all that it was predicted to hold.
-- KEYS: see _pool.lua
-- ARGV: cmsgpack { { worker, fleet record ('': leave it as it is), incarnation (text), has a sample (1 or 0), age of the
--   sample us, age of the last booking that it has us (-1: none), queued, running, waiting, kv }... }
register('kvatlas_pool_report', function(keys, args)
  local now = now_us()
  purge(keys, now)
  for _, told in ipairs(cmsgpack.unpack(args[1])) do
    local worker = told[1]
    if told[2] ~= '' then
      if redis.call('EXISTS', keys[1]) == 0 then
        for i = 2, #keys do
          redis.call('PERSIST', keys[i])
        end
      end
      redis.call('HSET', keys[1], worker, told[2])
    end
    local record = get_worker(keys, worker)
    if record[SAMPLED] > now + CLOCK_SLACK_US then
      start_anew(keys)
      record = get_worker(keys, worker)
    end
    if record[INCARNATION] ~= told[3] then
      if record[INCARNATION] ~= '' then
        drop_worker(keys, worker, now)
      end
      record = get_worker(keys, worker)
      record[INCARNATION] = told[3]
    end
    if told[4] == 1 and now - told[5] >= record[SAMPLED] then
      record[SAMPLED] = now - told[5]
      record[QUEUED], record[RUNNING], record[WAITING], record[KV] = told[7], told[8], told[9], told[10]
      local covered = now - told[6]
      if told[6] >= 0 and covered > record[COVERED] then
        local low = '[' .. worker .. '\0' .. string.format('%016d', record[COVERED] + 1)
        local high = '(' .. worker .. '\0' .. string.format('%016d', covered + 1)
        for _, member in ipairs(redis.call('ZRANGEBYLEX', keys[BOOKED], low, high)) do
          local packed = redis.call('HGET', keys[RESERVATIONS], string.sub(member, -ID_BYTES))
          count(record, cmsgpack.unpack(packed), -1)
        end
        record[COVERED] = covered
      end
    end
    put_worker(keys, worker, record)
  end
  return 0
end)

-- forget: the worker is not of the pool any more.
-- KEYS: see _pool.lua   ARGV: worker
register('kvatlas_pool_forget', function(keys, args)
  drop_worker(keys, args[1], now_us())
  redis.call('HDEL', keys[1], args[1])
  redis.call('HDEL', keys[LOAD], args[1])
  redis.call('HDEL', keys[RATES], args[1])
  keep_shortly(keys)
  return 0
end)
