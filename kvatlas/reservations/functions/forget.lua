-- forget: removes a worker from the pool, with everything that was booked, predicted and learned for it.
--
-- KEYS see _layout.lua
-- ARGV 1 worker
-- returns 0
register('kvatlas_pool_forget', function(keys, args)
  local worker = args[1]
  local record = find_worker(keys, worker)
  if record then
    record[GROUP] = 0
    put_worker(keys, worker, record)
    redis.call('HDEL', keys[LOAD], worker)
    redis.call('ZADD', keys[DEADLINES], 0, 'w' .. worker)
    purge(keys, now_us())
  end
  redis.call('HDEL', keys[WORKERS], worker)
  redis.call('HDEL', keys[RATES], worker)
  redis.call('HDEL', keys[SOURCES], worker)
  expire_without_workers(keys)
  return 0
end)
