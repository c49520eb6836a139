-- What all functions of a pool share. Every function takes the same KEYS, all in one slot, kva:{pool:<id>}:*
-- (kvatlas/reservations/redis_calls.py names them in this order)
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
-- requests, KV tokens; then the sums over bookings that are not in it: queued tokens, running requests, KV tokens; predicted
-- steps. Then its incarnation as text.
-- reservation: worker ('': the booking was called off before it came), router, booked us, queued tokens, KV tokens, prefilling
-- (1 or 0).
-- prediction: worker, ready us, used us, ends us, us for which it is believed once it is ready, number of its first step,
-- capacity of its worker in steps (0: its events will confirm it), packed hashes of its steps.

local WORKERS, LOAD, RESERVATIONS, BOOKED, ROUTERS = 1, 2, 3, 4, 5
local PREDICTIONS, ANCHORS, PREDICTED, DEADLINES, RATES = 6, 7, 8, 9, 10
local SAMPLED, COVERED, QUEUED, RUNNING, WAITING, KV = 1, 2, 3, 4, 5, 6
local BOOKED_QUEUED, BOOKED_RUNNING, BOOKED_KV, STEPS, INCARNATION = 7, 8, 9, 10, 11
local R_WORKER, R_ROUTER, R_BOOKED_US, R_QUEUED, R_KV, R_PREFILLING = 1, 2, 3, 4, 5, 6
local P_WORKER, P_READY_US, P_USED_US, P_ENDS_US, P_BELIEVED_US, P_FIRST_STEP, P_CAPACITY, P_HASHES = 1, 2, 3, 4, 5, 6, 7, 8
local OUTCOME = { finished = 'finished', failed = 'failed', called_off = 'called_off' } -- of a reservation
local WORKER = '>dddddddddd'
local ID_BYTES, HASH_BYTES = 16, 8
local CHUNK = 3500 -- unpack fails from 8,000 values up
local CLOCK_SLACK_US = 1000000
local UNUSED_MS = 3600000

-- Returns a member of `booked` or `predicted`.
local function place(worker, us, id)
  return worker .. '\0' .. string.format('%016d', us) .. id
end

-- Returns the packed record of a worker of which nothing is known.
local function no_worker()
  return string.rep('\0', 80)
end

local function get_worker(keys, worker)
  local packed = redis.call('HGET', keys[LOAD], worker) or no_worker()
  local record = { struct.unpack(WORKER, packed) } -- and, behind them, the position of the rest
  record[INCARNATION] = string.sub(packed, record[INCARNATION])
  return record
end

local function put_worker(keys, worker, record)
  redis.call('HSET', keys[LOAD], worker, struct.pack(WORKER, unpack(record, SAMPLED, STEPS)) .. record[INCARNATION])
end

-- Adds a reservation's load to its worker's sums, or subtracts it (sign -1), unless the sample has it.
local function count(record, reservation, sign)
  if reservation[R_BOOKED_US] > record[COVERED] then
    record[BOOKED_QUEUED] = record[BOOKED_QUEUED] + sign * reservation[R_QUEUED]
    record[BOOKED_RUNNING] = record[BOOKED_RUNNING] + sign
    record[BOOKED_KV] = record[BOOKED_KV] + sign * reservation[R_KV]
  end
end

-- Lets a pool without workers expire: nothing else would ever remove what its routers still write.
local function expire_without_workers(keys)
  if redis.call('EXISTS', keys[WORKERS]) == 0 then
    for i = 2, #keys do
      redis.call('PEXPIRE', keys[i], UNUSED_MS)
    end
  end
end

-- Forgets all that was booked and reported: the store's clock went back (another server's, or stepped), and what is there
-- would count as fresh until the clock is where it was.
local function reset(keys)
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
  redis.call('ZADD', keys[DEADLINES], string.format('%d', prediction[P_ENDS_US]), 'p' .. id)
end

local function drop_prediction(keys, id, prediction)
  local worker, hashes, left = prediction[P_WORKER], prediction[P_HASHES], {}
  local anchor = string.sub(hashes, 1, HASH_BYTES)
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
  redis.call('ZREM', keys[PREDICTED], place(worker, prediction[P_USED_US], id))
  redis.call('ZREM', keys[DEADLINES], 'p' .. id)
  local record = get_worker(keys, worker)
  record[STEPS] = record[STEPS] - #hashes / HASH_BYTES
  put_worker(keys, worker, record)
end

-- The prompt's prefix is computed: it is held from now on, and that is believed for a while.
local function settle_prediction(keys, id, now)
  local prediction = get_prediction(keys, id)
  if prediction then
    prediction[P_READY_US] = math.min(prediction[P_READY_US], now)
    prediction[P_ENDS_US] = now + prediction[P_BELIEVED_US]
    put_prediction(keys, id, prediction)
  end
end

-- Ends a reservation. If it is not `finished`, a prefix that was still being computed is no longer believed.
local function drop_reservation(keys, id, reservation, finished, now)
  redis.call('HDEL', keys[RESERVATIONS], id)
  redis.call('ZREM', keys[DEADLINES], 'r' .. id)
  local worker = reservation[R_WORKER]
  if worker == '' then
    return
  end
  redis.call('ZREM', keys[BOOKED], place(worker, reservation[R_BOOKED_US], id))
  local record = get_worker(keys, worker)
  count(record, reservation, -1)
  put_worker(keys, worker, record)
  if reservation[R_PREFILLING] == 1 then
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

-- Ends a router's lease, and with it its reservations.
local function drop_router(keys, router, now)
  redis.call('HDEL', keys[ROUTERS], router)
  local flat = redis.call('HGETALL', keys[RESERVATIONS])
  for i = 1, #flat, 2 do
    local id, reservation = flat[i], cmsgpack.unpack(flat[i + 1])
    if reservation[R_ROUTER] == router then
      drop_reservation(keys, id, reservation, false, now)
    end
  end
end

-- Ends all that was booked on a worker, and all that it was predicted to hold.
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

-- Ends what a worker was predicted to hold, except of prompts that it is still computing.
local function drop_settled_predictions(keys, worker)
  local low, high = '[' .. worker .. '\0', '(' .. worker .. '\1'
  for _, member in ipairs(redis.call('ZRANGEBYLEX', keys[PREDICTED], low, high)) do
    local id = string.sub(member, -ID_BYTES)
    local packed = redis.call('HGET', keys[RESERVATIONS], id)
    if not packed or cmsgpack.unpack(packed)[R_PREFILLING] ~= 1 then
      drop_prediction(keys, id, get_prediction(keys, id))
    end
  end
end

-- Ends what is over: reservations and predictions by their own deadlines, and all reservations of routers whose lease is over.
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
    local router, lease_ends = flat[i], tonumber(flat[i + 1])
    if lease_ends <= now then
      drop_router(keys, router, now)
    end
  end
end
