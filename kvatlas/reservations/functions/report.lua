-- Workers as the owner of their partition reports them.

local COVERED_MOST = 250 -- bookings that one call takes to be in samples

-- Incarnations are 64-bit numbers as text without leading zeros: a double would not hold them.
local function is_lower(one, other)
  return #one < #other or (#one == #other and one < other)
end

-- Takes bookings up to a time to be in a worker's sample, the first `most` of them. Returns how many.
local function cover(keys, worker, record, covered, most)
  local name = worker .. '\0'
  local low, high = '[' .. name .. string.format('%016d', record[COVERED] + 1), '(' .. name .. string.format('%016d', covered + 1)
  local members = redis.call('ZRANGEBYLEX', keys[BOOKED], low, high, 'LIMIT', 0, most)
  if #members == most then -- all of the last one's microsecond, then a later sample goes on behind it
    local last = string.sub(members[most], 1, -ID_BYTES - 1)
    covered = tonumber(string.sub(last, -16))
    members = redis.call('ZRANGEBYLEX', keys[BOOKED], low, '(' .. name .. string.format('%016d', covered + 1))
  end
  for _, member in ipairs(members) do
    local packed = redis.call('HGET', keys[RESERVATIONS], string.sub(member, -ID_BYTES))
    count(record, cmsgpack.unpack(packed), -1)
  end
  record[COVERED] = covered
  return #members
end

-- report: fleet records and load samples. Bookings made before a sample (by the time that a request may travel) are in it.
-- A report of a lower incarnation than the last one is late, and ignored. A higher one ends what the worker was predicted to
-- hold; what is booked there stays: a snapshot begins an incarnation too, and the engine's requests go on.
--
-- KEYS see _layout.lua
-- ARGV 1 cmsgpack { { worker, fleet record ('': leave it as it is), incarnation (text), has a sample (1 or 0), age of the
--        sample us, age of the last booking that is in it us (-1: none is), queued tokens, running requests, waiting requests,
--        KV tokens, likeness ('': it gets no requests), request slots, KV tokens of its cache (0: unknown) }... }
-- returns 0
register('kvatlas_pool_report', function(keys, args)
  local now, left, left_drops = now_us(), COVERED_MOST, SLICE
  purge(keys, now)
  for _, report in ipairs(cmsgpack.unpack(args[1])) do
    local worker, fleet_record, incarnation, has_sample, age_us, covered_age_us, queued, running, waiting, kv,
      likeness, slots, kv_limit = unpack(report)
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
    if not is_lower(incarnation, record[INCARNATION]) then
      if record[INCARNATION] ~= incarnation then
        if record[INCARNATION] ~= '' then
          left_drops = left_drops - drop_settled(keys, worker, now, '', left_drops, now)
          record = get_worker(keys, worker)
        end
        record[INCARNATION] = incarnation
      end
      record[GROUP], record[SLOTS], record[KV_LIMIT] = group_of(keys, likeness), slots, kv_limit
      if has_sample == 1 and now - age_us >= record[SAMPLED] then
        record[SAMPLED], record[BELIEVED] = now - age_us, 1
        record[QUEUED], record[RUNNING], record[WAITING], record[KV] = queued, running, waiting, kv
        local covered = now - covered_age_us
        if covered_age_us >= 0 and covered > record[COVERED] and left > 0 then
          left = left - cover(keys, worker, record, covered, left)
        end
      end
    end
    put_worker(keys, worker, record)
  end
  return 0
end)

-- forget: takes a worker out of the pool, with all that was booked, predicted and learned there.
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
  expire_without_workers(keys)
  return 0
end)
