-- Workers as the owner of their partition reports them.

-- report: fleet records and load samples. Bookings made before a sample (by the time that a request may travel) are in it.
-- A report of a lower incarnation than the last one is late, and ignored. A higher one ends what the worker was predicted to
-- hold; what is booked there stays: a snapshot begins an incarnation too, and the engine's requests go on.
--
-- KEYS see _pool.lua
-- ARGV 1 cmsgpack { { worker, fleet record ('': leave it as it is), incarnation (text), has a sample (1 or 0), age of the
--        sample us, age of the last booking that is in it us (-1: none is), queued tokens, running requests, waiting requests,
--        KV tokens }... }
-- returns 0

-- Incarnations are 64-bit numbers as text without leading zeros: a double would not hold them.
local function is_lower(one, other)
  return #one < #other or (#one == #other and one < other)
end

register('kvatlas_pool_report', function(keys, args)
  local now = now_us()
  purge(keys, now)
  for _, report in ipairs(cmsgpack.unpack(args[1])) do
    local worker, fleet_record, incarnation, has_sample, age_us, covered_age_us, queued, running, waiting, kv = unpack(report)
    if fleet_record ~= '' then
      if redis.call('EXISTS', keys[WORKERS]) == 0 then
        for i = 2, #keys do
          redis.call('PERSIST', keys[i])
        end
      end
      redis.call('HSET', keys[WORKERS], worker, fleet_record)
    end
    local record = get_worker(keys, worker)
    if record[SAMPLED] > now + CLOCK_SLACK_US then
      reset(keys)
      record = get_worker(keys, worker)
    end
    local late = is_lower(incarnation, record[INCARNATION])
    if not late and record[INCARNATION] ~= incarnation then
      if record[INCARNATION] ~= '' then
        drop_settled_predictions(keys, worker)
      end
      record = get_worker(keys, worker)
      record[INCARNATION] = incarnation
    end
    if not late and has_sample == 1 and now - age_us >= record[SAMPLED] then
      record[SAMPLED] = now - age_us
      record[QUEUED], record[RUNNING], record[WAITING], record[KV] = queued, running, waiting, kv
      local covered = now - covered_age_us
      if covered_age_us >= 0 and covered > record[COVERED] then
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

-- forget: takes a worker out of the pool, with all that was booked, predicted and learned there.
--
-- KEYS see _pool.lua
-- ARGV 1 worker
-- returns 0
register('kvatlas_pool_forget', function(keys, args)
  local worker = args[1]
  drop_worker(keys, worker, now_us())
  redis.call('HDEL', keys[WORKERS], worker)
  redis.call('HDEL', keys[LOAD], worker)
  redis.call('HDEL', keys[RATES], worker)
  expire_without_workers(keys)
  return 0
end)
