-- The data that the store has about a pool. Every function takes the same KEYS, which are all in one slot (kva:{pool:<id>}:*);
-- kvatlas/reservations/redis_calls.py names them in the same order.
--
--   1 workers       HASH  worker id -> FleetRecord, as the indexer wrote it
--   2 load          HASH  worker id -> packed worker (below): its report, and what has been booked on it since
--   3 reservations  HASH  id (16 bytes) -> cmsgpack reservation (below)
--   4 booked        ZSET  <worker> \0 <booked us, 16 digits> <id>, by bytes: a worker's reservations in order
--   5 owned         ZSET  <owner> \0 <id>, by bytes: the reservations made under a lease
--   6 routers       HASH  router id -> number of its lease; <router id> \0 <number> is an owner
--   7 predictions   HASH  id (that of its reservation) -> cmsgpack prediction (below)
--   8 anchors       HASH  first hash of a prediction -> ids, 16 bytes each
--   9 predicted     ZSET  <worker> \0 <used us, 16 digits> <id>, by bytes: a worker's predictions in order of use
--  10 deadlines     ZSET  what ends, scored with the us at which it does: 'r' <id> reservation, 'p' <id> prediction,
--                         'l' <router> lease; and what has ended and is removed in slices, scored 0: 'o' <owner> its
--                         reservations, 'w' <worker> what its former generations left, 's' <worker> \0 <us, 16 digits> <place>
--                         what it was predicted to hold at that time, from this place in `predicted` on
--  11 groups        HASH  likeness (8 bytes) -> number of its group; 's' <number> -> packed sums of a group's known loads;
--                         'next' -> the last number given to a lease or a generation, 'last' -> to a group; 'damages' -> how
--                         often the pool was repaired since that was last reported, 'damage' -> what was damaged then;
--                         'tables' -> us at which small keys were made tables, see report.lua
--  12 samples       ZSET  the workers whose load sample is believed, scored with the us of the sample
--  13 order_queued, order_running, order_kv, order_mix: the workers of all groups by load, see _orders.lua
--  17 sources       HASH  worker id -> us at which the fetches that are booked there should have ended
--  18 queued_requests, queue_numbers, queue_counters (HASH), queue_lines, queue_deadlines (ZSET), queue_charges (HASH): the
--                         requests that wait for a worker with room, see _queue.lua
--  24 rates         HASH  worker id -> cmsgpack evidence of its rates (learn.lua)
--
-- worker: fifteen big-endian doubles, which are read ten times as fast as cmsgpack, then its incarnation as text. The doubles:
-- us of its load sample (0: none), us up to which bookings are in that sample, queued tokens, running requests, waiting
-- requests, KV tokens; the sums over the bookings that are not in the sample: queued tokens, running requests, KV tokens;
-- predicted steps; request slots, KV tokens of its cache (0: unknown), number of its group (0: none), whether its sample is
-- believed (1 or 0), number of its generation. A worker that was forgotten and comes back begins another generation;
-- reservations and predictions of an earlier one don't count, even before they are removed.
-- reservation: worker ('': the booking was cancelled before it arrived), owner, booked us, queued tokens, KV tokens, prefilling
-- (1 or 0), generation of its worker.
-- prediction: worker, us at which it is ready, was last used, ends; us for which it is believed once it is ready; number of its
-- first step; capacity of its worker in steps (0: the worker's events will confirm it); packed hashes of its steps; generation
-- of its worker; us at which it was made.

local WORKERS, LOAD, RESERVATIONS, BOOKED, OWNED, ROUTERS = 1, 2, 3, 4, 5, 6
local PREDICTIONS, ANCHORS, PREDICTED, DEADLINES, GROUPS, SAMPLES = 7, 8, 9, 10, 11, 12
local ORDER_QUEUED, ORDER_RUNNING, ORDER_KV, ORDER_MIX, SOURCES = 13, 14, 15, 16, 17
local QUEUED_REQUESTS, QUEUE_NUMBERS, QUEUE_COUNTERS, QUEUE_LINES, QUEUE_DEADLINES, QUEUE_CHARGES = 18, 19, 20, 21, 22, 23
local RATES = 24
local IS_ZSET = {
  [BOOKED] = true, [OWNED] = true, [PREDICTED] = true, [DEADLINES] = true, [SAMPLES] = true, [ORDER_QUEUED] = true,
  [ORDER_RUNNING] = true, [ORDER_KV] = true, [ORDER_MIX] = true, [QUEUE_LINES] = true,
  [QUEUE_DEADLINES] = true,
}
local SAMPLED, COVERED, QUEUED, RUNNING, WAITING, KV = 1, 2, 3, 4, 5, 6
local BOOKED_QUEUED, BOOKED_RUNNING, BOOKED_KV, STEPS = 7, 8, 9, 10
local SLOTS, KV_LIMIT, GROUP, BELIEVED, GENERATION, INCARNATION = 11, 12, 13, 14, 15, 16
local WORKER_BYTES = 120 -- followed by its incarnation
local R_WORKER, R_OWNER, R_BOOKED_US, R_QUEUED, R_KV, R_PREFILLING, R_GENERATION = 1, 2, 3, 4, 5, 6, 7
local P_WORKER, P_READY_US, P_USED_US, P_ENDS_US, P_BELIEVED_US = 1, 2, 3, 4, 5
local P_FIRST_STEP, P_CAPACITY, P_HASHES, P_GENERATION, P_MADE_US = 6, 7, 8, 9, 10
local RESERVATION_FORM = { 'string', 'string', 'number', 'number', 'number', 'number', 'number' }
local PREDICTION_FORM = {
  'string', 'number', 'number', 'number', 'number', 'number', 'number', 'string', 'number', 'number',
}
local OUTCOME = { finished = 'finished', failed = 'failed', broken = 'broken', called_off = 'called_off' } -- of a reservation
local WORKER, LOADS = '>ddddddddddddddd', '>ddddddddd' -- all numbers of a worker, and those that say how busy it is
local ID_BYTES, HASH_BYTES = 16, 8
local CHUNK = 3500 -- unpack fails with 8,000 values
local CLOCK_SLACK_US = 1000000
local STALE_US = 5000000 -- a load sample that is older than this is ignored
local UNUSED_MS = 3600000
local MOST_ROWS, MOST_REPORTED = 256, 24 -- workers that one call changes, or reports
local MOST_ANCHORED = 256 -- predictions that begin with the same step
local SLICE = 16 -- reservations and predictions that one call removes because they are over

-- Returns the packed record of a worker of which nothing is known.
local function no_worker()
  return string.rep('\0', WORKER_BYTES)
end

-- Raises an error that says what is damaged.
local function damaged(what)
  error({ err = 'DAMAGED ' .. what })
end

-- Returns true for a number that is neither infinite nor NaN.
local function is_finite(value)
  return type(value) == 'number' and value - value == 0
end

-- Unpacks a list that consists of at most `most` lists.
local function unpack_rows(packed, most)
  local rows = cmsgpack.unpack(packed)
  if type(rows) ~= 'table' or #rows > most then
    error({ err = 'ERR argument: expected a list of at most ' .. most .. ' rows' })
  end
  return rows
end

-- Returns a HASH as a flat list. Raises `damaged` if it has more than `most` fields, which no function writes.
local function read_whole(key, most)
  if redis.call('HLEN', key) > most then
    damaged('a list with too many entries')
  end
  return redis.call('HGETALL', key)
end

-- Unpacks a cmsgpack record. Raises `damaged` unless its fields have these types.
local function unpack_record(packed, form, what)
  local done, record = pcall(cmsgpack.unpack, packed)
  if not done or type(record) ~= 'table' or #record ~= #form then
    damaged(what)
  end
  for i = 1, #form do
    local value, kind = record[i], form[i]
    if type(value) ~= kind or (kind == 'number' and value - value ~= 0) then
      damaged(what)
    end
  end
  return record
end

local function next_number(keys)
  return redis.call('HINCRBY', keys[GROUPS], 'next', 1)
end

-- Returns one number of a packed worker.
local function number_in(packed, field)
  return (struct.unpack('>d', packed, field * 8 - 7))
end

local function group_in(packed)
  return number_in(packed, GROUP)
end

-- Raises `damaged` if a worker's packed record is too short.
local function check_length(packed)
  if #packed < WORKER_BYTES then
    damaged('load')
  end
end

local function unpack_worker(packed)
  check_length(packed)
  local record = { struct.unpack(WORKER, packed) } -- followed by the position of the rest
  local sum = 0
  for i = SAMPLED, GENERATION do
    sum = sum + record[i]
  end
  if sum - sum ~= 0 or string.find(packed, '%D', WORKER_BYTES + 1) then
    damaged('load')
  end
  record[INCARNATION], record.packed = string.sub(packed, record[INCARNATION]), packed
  return record
end

-- Returns the record of a worker; nil if there is none.
local function find_worker(keys, worker)
  local packed = redis.call('HGET', keys[LOAD], worker)
  return packed and unpack_worker(packed)
end

local function get_reservation(keys, id)
  local packed = redis.call('HGET', keys[RESERVATIONS], id)
  return packed and unpack_record(packed, RESERVATION_FORM, 'reservation')
end

local function unpack_prediction(packed)
  local prediction = unpack_record(packed, PREDICTION_FORM, 'prediction')
  if prediction[P_HASHES] == '' or #prediction[P_HASHES] % HASH_BYTES > 0 then
    damaged('prediction')
  end
  return prediction
end

local function get_prediction(keys, id)
  local packed = redis.call('HGET', keys[PREDICTIONS], id)
  return packed and unpack_prediction(packed)
end

-- Returns a worker's record; a new one if nothing is known about the worker yet.
local function get_worker(keys, worker)
  local record = find_worker(keys, worker)
  if not record then
    record = unpack_worker(no_worker())
    record[GENERATION] = next_number(keys)
  end
  return record
end
