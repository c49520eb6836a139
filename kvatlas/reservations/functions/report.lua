-- Workers, as the owner of their partition reports them.

local MOST_REPORT = 1048576 -- bytes
local COVERED_MOST = 250 -- bookings that one call counts as included in samples

-- Returns true if one incarnation is lower than the other. They are 64-bit numbers, as text without leading zeros, because a
-- double can't hold them.
local function is_lower(one, other)
  return #one < #other or (#one == #other and one < other)
end

-- Keeps counting the newest bookings of a range instead of the sample, because their prompts are not computed yet: as
-- many as are waiting, and one more if any request is running. Takes these requests out of the sample. Returns the us
-- up to which bookings are in it.
local function keep_uncomputed(record, members, reservations, covered, waiting)
  local most, kept = waiting + math.min(1, record[RUNNING]), 0
  if record[QUEUED] > 0 and waiting == 0 then
    most = 0 -- the engine's own number of queued tokens is known
  end
  for i = #members, 1, -1 do
    local reservation = reservations[i]
    if kept == most or reservation[R_PREFILLING] ~= 1 or reservation[R_GENERATION] ~= record[GENERATION] then
      break
    end
    kept, covered = kept + 1, reservation[R_BOOKED_US] - 1
  end
  local first = #members + 1
  while first > 1 and reservations[first - 1][R_BOOKED_US] > covered do
    first = first - 1
  end
  local going_on = #members + 1 - first
  local known = math.min(going_on, waiting)
  for i = first, #members - known do
    record[RUNNING], record[KV] = record[RUNNING] - 1, record[KV] - reservations[i][R_KV]
  end
  record[RUNNING], record[KV] = math.max(0, record[RUNNING]), math.max(0, record[KV])
  record[WAITING] = math.max(0, record[WAITING] - known)
  if waiting > 0 then
    record[QUEUED] = math.floor(record[QUEUED] * ((waiting - known) / waiting))
  end
  return covered
end

-- Counts a worker's bookings up to a time as included in its sample, but at most the first `most`, and not those whose prompts
-- are waiting. Returns how many it looked at.
local function cover(keys, worker, record, covered, waiting, most)
  local name = worker .. '\0'
  local low = '[' .. name .. string.format('%016d', record[COVERED] + 1)
  local high = '(' .. name .. string.format('%016d', covered + 1)
  local members = redis.call('ZRANGEBYLEX', keys[BOOKED], low, high, 'LIMIT', 0, most)
  if #members == most then -- take all bookings of the last one's microsecond; a later sample continues after it
    local last = string.sub(members[most], 1, -ID_BYTES - 1)
    covered = tonumber(string.sub(last, -16))
    members = redis.call('ZRANGEBYLEX', keys[BOOKED], low, '(' .. name .. string.format('%016d', covered + 1))
  end
  local reservations = {}
  for i, member in ipairs(members) do
    reservations[i] = get_reservation(keys, string.sub(member, -ID_BYTES))
    if not reservations[i] then
      damaged('booked')
    end
  end
  if #members < most then
    covered = keep_uncomputed(record, members, reservations, covered, waiting)
  end
  for _, reservation in ipairs(reservations) do
    if reservation[R_BOOKED_US] <= covered then
      count(record, reservation, -1)
    end
  end
  record[COVERED] = covered
  return #members
end

-- Resets the sums over the bookings that are not in the sample if there are no such bookings, because the sums may have been
-- damaged.
local function settle_sums(keys, worker, record)
  if record[BOOKED_QUEUED] ~= 0 or record[BOOKED_RUNNING] ~= 0 or record[BOOKED_KV] ~= 0 then
    local low = '[' .. worker .. '\0' .. string.format('%016d', record[COVERED] + 1)
    if redis.call('ZLEXCOUNT', keys[BOOKED], low, '(' .. worker .. '\1') == 0 then
      record[BOOKED_QUEUED], record[BOOKED_RUNNING], record[BOOKED_KV] = 0, 0, 0
    end
  end
end

-- The server keeps a small HASH or ZSET as a list and searches it from the beginning: a choice in a pool of 64 workers
-- spent a sixth of its instructions on that. One that has had a long entry stays a table until it is empty or loaded from a
-- file.
local LONG_BYTES, TABLES_US = 65, 30000000

local function keep_as_tables(keys, now)
  local kept_us = tonumber(redis.call('HGET', keys[GROUPS], 'tables')) or 0
  if now - kept_us < TABLES_US and kept_us <= now then
    return
  end
  local long = string.rep('\255', LONG_BYTES)
  for i in pairs(IS_ZSET) do
    redis.call('ZADD', keys[i], 0, long)
    redis.call('ZREM', keys[i], long)
  end
  for _, i in ipairs({ RESERVATIONS, ANCHORS }) do
    redis.call('HSET', keys[i], long, '')
    redis.call('HDEL', keys[i], long)
  end
  redis.call('HSET', keys[GROUPS], 'tables', string.format('%d', now))
end

-- report: fleet records and load samples. A sample includes the bookings made before it (by the time that a request may take
-- to arrive), except the newest of those whose prompts the engine has not computed: these keep counting, because the sample
-- does not include their tokens. A report with a lower incarnation than the last one is late and is ignored. A higher
-- incarnation ends the worker's predictions. Its bookings stay, because a snapshot also begins an incarnation while the
-- engine's requests continue.
--
-- KEYS see _layout.lua
-- ARGV 1 cmsgpack { { worker, fleet record ('': leave it as it is), incarnation (text), has a sample (1 or 0), us since the
--        sample, us since the last booking that is in it (-1: none is), queued tokens, running requests, waiting requests,
--        KV tokens, likeness ('': it gets no requests), request slots, KV tokens of its cache (0: unknown), requests whose
--        prompts the engine had not begun }... }
-- returns {how often the pool was repaired since the last report (decimal), what was damaged last}; {} if it was not repaired
register('kvatlas_pool_report', function(keys, args)
  local now, left, left_drops = now_us(), COVERED_MOST, SLICE
  purge(keys, now)
  for _, report in ipairs(unpack_rows(args[1], MOST_REPORTED)) do
    local worker, fleet_record, incarnation, has_sample, age_us, covered_age_us, queued, running, waiting, kv,
      likeness, slots, kv_limit, not_begun = unpack(report)
    if fleet_record ~= '' then
      if redis.call('EXISTS', keys[WORKERS]) == 0 then
        for i = 2, #keys do
          redis.call('PERSIST', keys[i])
        end
      end
      redis.call('HSET', keys[WORKERS], worker, fleet_record)
    end
    local record = get_worker(keys, worker)
    if math.max(record[SAMPLED], record[COVERED]) > now + CLOCK_SLACK_US then
      reset(keys)
      record = get_worker(keys, worker)
    end
    if not is_lower(incarnation, record[INCARNATION]) then
      if record[INCARNATION] ~= incarnation then
        if record[INCARNATION] ~= '' then
          left_drops = left_drops - drop_settled(keys, worker, now, '', left_drops)
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
          left = left - cover(keys, worker, record, covered, not_begun, left)
        end
        settle_sums(keys, worker, record)
      end
    end
    put_worker(keys, worker, record)
  end
  keep_as_tables(keys, now)
  local damages = redis.call('HMGET', keys[GROUPS], 'damages', 'damage')
  if damages[1] then
    redis.call('HDEL', keys[GROUPS], 'damages', 'damage')
  end
  return damages[1] and damages or {}
end, 1, MOST_REPORT)
