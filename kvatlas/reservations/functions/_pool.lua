-- What all functions of a pool share. Every function takes the same KEYS, all in one slot, kva:{pool:<id>}:*
--
--   1 workers       HASH  worker id -> FleetRecord, as the indexer wrote it
--   2 load          HASH  worker id -> packed worker (below): what it reported, and what was booked since
--   3 reservations  HASH  id (16 bytes) -> cmsgpack reservation (below)
--   4 booked        ZSET  <worker> \0 <booked us, 16 digits> <id>, by bytes: the reservations of a worker in order
--   5 routers       HASH  router id -> when its lease ends, us
--   6 predictions   HASH  id (that of its reservation) -> cmsgpack prediction (below)
--   7 anchors       HASH  first hash of a prediction -> ids, 16 bytes each
--   8 predicted     ZSET  <worker> \0 <used us, 16 digits> <id>, by bytes: the predictions of a worker in order of use
--   9 deadlines     ZSET  'r' <id> or 'p' <id>, scored with the us at which it ends
--  10 rates         HASH  worker id -> cmsgpack evidence of its rates (learn.lua)
--
-- worker: ten big-endian doubles, because those are read ten times as fast as cmsgpack, and every choice reads every worker:
-- us of its load sample (0: none), us up to which bookings are in that sample, queued tokens, running requests, waiting
-- requests, KV tokens; then the sums over bookings that are not in it: queued tokens, running requests, KV tokens; steps
-- predicted. Then its incarnation as text.
-- reservation: worker, router, booked us, queued tokens, KV tokens, prefilling (1 or 0). Of a booking that was called off
-- before it came: the worker ''.
-- prediction: worker, ready us, used us, ends us, believed for us after it is ready, number of its first step, capacity of
-- its worker in steps (0: its events will confirm it), packed hashes of its steps.

local LOAD, RESERVATIONS, BOOKED, ROUTERS, PREDICTIONS, ANCHORS, PREDICTED, DEADLINES, RATES = 2, 3, 4, 5, 6, 7, 8, 9, 10
local SAMPLED, COVERED, QUEUED, RUNNING, WAITING, KV = 1, 2, 3, 4, 5, 6
local BOOKED_QUEUED, BOOKED_RUNNING, BOOKED_KV, STEPS, INCARNATION = 7, 8, 9, 10, 11
local WORKER = '>dddddddddd'
local ID_BYTES, HASH_BYTES = 16, 8
local CHUNK = 3500 -- unpack fails from 8,000 values up
local CLOCK_SLACK_US = 1000000
local UNUSED_MS = 3600000

local function place(worker, us, id)
  return worker .. '\0' .. string.format('%016d', us) .. id
end

-- One of which nothing is known.
local function no_worker()
  return string.rep('\0', 80)
end

local function get_worker(keys, worker)
  local packed = redis.call('HGET', keys[LOAD], worker) or no_worker()
  local record = { struct.unpack(WORKER, packed) } -- and where it stopped
  record[INCARNATION] = string.sub(packed, record[INCARNATION])
  return record
end

local function put_worker(keys, worker, record)
  redis.call('HSET', keys[LOAD], worker, struct.pack(WORKER, unpack(record, SAMPLED, STEPS)) .. record[INCARNATION])
end

-- Adds a reservation's load to its worker's sums, or takes it away (sign -1), unless a sample has it.
local function count(record, reservation, sign)
  if reservation[3] > record[COVERED] then
    record[BOOKED_QUEUED] = record[BOOKED_QUEUED] + sign * reservation[4]
    record[BOOKED_RUNNING] = record[BOOKED_RUNNING] + sign
    record[BOOKED_KV] = record[BOOKED_KV] + sign * reservation[5]
  end
end

-- A pool without workers has nobody that would ever take out what its routers still tell: it goes by itself.
local function keep_shortly(keys)
  if redis.call('EXISTS', keys[1]) == 0 then
    for i = 2, #keys do
      redis.call('PEXPIRE', keys[i], UNUSED_MS)
    end
  end
end

-- Nothing was ever booked or reported: for a store whose clock went back (another server's, or stepped). What is there would
-- count as fresh until the clock is where it was.
local function start_anew(keys)
  for i = LOAD, DEADLINES do
    redis.call('UNLINK', keys[i])
  end
end

local function get_prediction(keys, id)
  local packed = redis.call('HGET', keys[PREDICTIONS], id)
  return packed and cmsgpack.unpack(packed)
end

local function put_prediction(keys, id, prediction)
  redis.call('HSET', keys[PREDICTIONS], id, cmsgpack.pack(prediction))
  redis.call('ZADD', keys[DEADLINES], string.format('%d', prediction[4]), 'p' .. id)
end

local function drop_prediction(keys, id, prediction)
  local anchor, left = string.sub(prediction[8], 1, HASH_BYTES), {}
  local ids = redis.call('HGET', keys[ANCHORS], anchor) or ''
  for at = 1, #ids, ID_BYTES do
    local other = string.sub(ids, at, at + ID_BYTES - 1)
    if other ~= id then
      left[#left + 1] = other
    end
  end
  if #left > 0 then
    redis.call('HSET', keys[ANCHORS], anchor, table.concat(left))
  else
    redis.call('HDEL', keys[ANCHORS], anchor)
  end
  redis.call('HDEL', keys[PREDICTIONS], id)
  redis.call('ZREM', keys[PREDICTED], place(prediction[1], prediction[3], id))
  redis.call('ZREM', keys[DEADLINES], 'p' .. id)
  local record = get_worker(keys, prediction[1])
  record[STEPS] = record[STEPS] - #prediction[8] / HASH_BYTES
  put_worker(keys, prediction[1], record)
end

-- The prompt's prefix is computed: it is held from now on, and believed so for a while.
local function settle_prediction(keys, id, now)
  local prediction = get_prediction(keys, id)
  if prediction then
    prediction[2] = math.min(prediction[2], now)
    prediction[4] = now + prediction[5]
    put_prediction(keys, id, prediction)
  end
end

-- Ends a reservation. Unless it `finished`, a prefix that was still being computed is not believed any more.
local function drop_reservation(keys, id, reservation, finished, now)
  redis.call('HDEL', keys[RESERVATIONS], id)
  redis.call('ZREM', keys[DEADLINES], 'r' .. id)
  if reservation[1] == '' then
    return
  end
  redis.call('ZREM', keys[BOOKED], place(reservation[1], reservation[3], id))
  local record = get_worker(keys, reservation[1])
  count(record, reservation, -1)
  put_worker(keys, reservation[1], record)
  if reservation[6] == 1 then
    if finished then
      settle_prediction(keys, id, now)
    else
      local prediction = get_prediction(keys, id)
      if prediction then
        drop_prediction(keys, id, prediction)
      end
    end
  end
end

local function drop_router(keys, router, now)
  redis.call('HDEL', keys[ROUTERS], router)
  local flat = redis.call('HGETALL', keys[RESERVATIONS])
  for i = 1, #flat, 2 do
    local reservation = cmsgpack.unpack(flat[i + 1])
    if reservation[2] == router then
      drop_reservation(keys, flat[i], reservation, false, now)
    end
  end
end

-- All that was booked on a worker, and all that it was predicted to hold.
local function drop_worker(keys, worker, now)
  local low, high = '[' .. worker .. '\0', '(' .. worker .. '\1'
  for _, member in ipairs(redis.call('ZRANGEBYLEX', keys[BOOKED], low, high)) do
    local id = string.sub(member, -ID_BYTES)
    drop_reservation(keys, id, cmsgpack.unpack(redis.call('HGET', keys[RESERVATIONS], id)), false, now)
  end
  for _, member in ipairs(redis.call('ZRANGEBYLEX', keys[PREDICTED], low, high)) do
    local id = string.sub(member, -ID_BYTES)
    drop_prediction(keys, id, get_prediction(keys, id))
  end
end

-- What has reached its end: reservations and predictions by their own deadline, and all of routers whose lease is over.
local function purge(keys, now)
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', keys[DEADLINES], '-inf', string.format('%d', now))) do
    local id = string.sub(member, 2)
    if string.sub(member, 1, 1) == 'p' then
      local prediction = get_prediction(keys, id)
      if prediction then
        drop_prediction(keys, id, prediction)
      end
    else
      local packed = redis.call('HGET', keys[RESERVATIONS], id)
      if packed then
        drop_reservation(keys, id, cmsgpack.unpack(packed), false, now)
      end
    end
  end
  local flat = redis.call('HGETALL', keys[ROUTERS])
  for i = 1, #flat, 2 do
    if tonumber(flat[i + 1]) <= now then
      drop_router(keys, flat[i], now)
    end
  end
end
