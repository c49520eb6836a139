-- Changes the records of a pool consistently, and ends them.

-- Returns a member of `booked` or `predicted`.
local function place(worker, us, id)
  return worker .. '\0' .. string.format('%016d', us) .. id
end

-- Returns the first `most` members of a ZSET that begin with a name followed by a zero byte.
local function first_of(key, name, most)
  return redis.call('ZRANGEBYLEX', key, '[' .. name .. '\0', '(' .. name .. '\1', 'LIMIT', 0, most)
end

local function put_worker(keys, worker, record)
  local packed = struct.pack(WORKER, unpack(record, SAMPLED, GENERATION)) .. record[INCARNATION]
  if packed ~= record.packed then
    redis.call('HSET', keys[LOAD], worker, packed)
    update_orders(keys, worker, record.packed, packed, record)
    record.packed = packed
  end
end

-- Adds the load of a reservation to its worker's sums, or subtracts it from them (sign -1), unless the worker's sample includes
-- it.
local function count(record, reservation, sign)
  if reservation[R_BOOKED_US] > record[COVERED] and reservation[R_GENERATION] == record[GENERATION] then
    record[BOOKED_QUEUED] = record[BOOKED_QUEUED] + sign * reservation[R_QUEUED]
    record[BOOKED_RUNNING] = record[BOOKED_RUNNING] + sign
    record[BOOKED_KV] = record[BOOKED_KV] + sign * reservation[R_KV]
  end
end

-- Makes a pool without workers expire, because nothing else would ever remove what routers write later.
local function expire_without_workers(keys)
  if redis.call('EXISTS', keys[WORKERS]) == 0 then
    for i = 2, #keys do
      redis.call('PEXPIRE', keys[i], UNUSED_MS)
    end
  end
end

-- Forgets everything that has been booked or reported, or that is waiting. This is needed when the store's clock has gone back
-- (because it is another server's clock, or was set): old data would count as fresh until the clock is back where it was.
local function reset(keys)
  for i = LOAD, QUEUE_CHARGES do
    redis.call('UNLINK', keys[i])
  end
end

-- Drops damaged data and everything that may depend on it: keys of other types, and everything that has been booked and
-- reported, which workers and routers will report and book again. The next report returns that this happened.
local function repair(keys, damage)
  redis.log(redis.LOG_WARNING, keys[1] .. ': ' .. damage .. ' is damaged; what belongs to it is dropped')
  if #keys == 1 then
    redis.call('UNLINK', keys[1])
    return
  end
  for i, key in ipairs(keys) do
    local kind = redis.call('TYPE', key).ok
    if kind ~= 'none' and kind ~= (IS_ZSET[i] and 'zset' or 'hash') then
      redis.pcall('UNLINK', key) -- a router may not drop fleet records; an indexer's report does it
    end
  end
  local damages = tonumber(redis.call('HGET', keys[GROUPS], 'damages')) or 0
  reset(keys)
  redis.call('HSET', keys[GROUPS], 'damages', string.format('%d', damages + 1), 'damage', damage)
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
  local record = find_worker(keys, worker)
  if record and record[GENERATION] == prediction[P_GENERATION] then
    record[STEPS] = record[STEPS] - #hashes / HASH_BYTES
    put_worker(keys, worker, record)
  end
end

-- Marks the prefix of a prompt as computed: it is held from now on, and this is believed for a while.
local function settle_prediction(keys, id, now)
  local prediction = get_prediction(keys, id)
  if prediction then
    prediction[P_READY_US] = math.min(prediction[P_READY_US], now)
    prediction[P_ENDS_US] = now + prediction[P_BELIEVED_US]
    put_prediction(keys, id, prediction)
  end
end

-- Ends a reservation with an OUTCOME. Unless it is `finished`, a prefix that was still being computed is no longer believed;
-- if it is `broken`, nor is one that was computed. `output`: the answer's tokens, if known. Returns whether it counted: not if
-- its worker's generation is over, or if it was cancelled.
local function drop_reservation(keys, id, reservation, outcome, now, output)
  redis.call('HDEL', keys[RESERVATIONS], id)
  redis.call('ZREM', keys[DEADLINES], 'r' .. id)
  record_queue_end(keys, id, output, outcome == OUTCOME.called_off)
  local worker = reservation[R_WORKER]
  if worker == '' then
    return false
  end
  redis.call('ZREM', keys[BOOKED], place(worker, reservation[R_BOOKED_US], id))
  redis.call('ZREM', keys[OWNED], reservation[R_OWNER] .. '\0' .. id)
  local record = find_worker(keys, worker)
  local counts = record and record[GENERATION] == reservation[R_GENERATION]
  if counts then
    count(record, reservation, -1)
    put_worker(keys, worker, record)
  end
  local computing = reservation[R_PREFILLING] == 1
  if computing and outcome == OUTCOME.finished then
    settle_prediction(keys, id, now)
  elseif computing or outcome == OUTCOME.broken then
    local prediction = get_prediction(keys, id)
    if prediction then
      drop_prediction(keys, id, prediction)
    end
  end
  return counts
end

-- Drops the reservation (kind 'r') or the prediction ('p') with this id. Returns false if there is none.
local function drop_if_there(keys, id, kind, now)
  local found = (kind == 'p' and get_prediction or get_reservation)(keys, id)
  if found and kind == 'p' then
    drop_prediction(keys, id, found)
  elseif found then
    drop_reservation(keys, id, found, OUTCOME.failed, now)
  end
  return found
end

-- Removes up to `most` reservations or predictions of a worker's former generations, which come first in a ZSET. Returns how
-- many were removed.
local function drop_former(keys, set, get, generation_at, worker, kind, most, now)
  local record, dropped = find_worker(keys, worker), 0
  for _, member in ipairs(first_of(keys[set], worker, most)) do
    local id = string.sub(member, -ID_BYTES)
    local found = get(keys, id)
    if found and record and found[generation_at] == record[GENERATION] then
      break
    end
    if not drop_if_there(keys, id, kind, now) then
      redis.call('ZREM', keys[set], member)
    end
    dropped = dropped + 1
  end
  return dropped
end

-- Ends what a worker was predicted to hold at some time, except for prompts that it is still computing. Looks at up to `most`
-- predictions after a place in their order, and leaves the remaining ones to `purge`. Returns how many it looked at.
local function drop_settled(keys, worker, then_us, after, most)
  local low = after == '' and '[' .. worker .. '\0' or '(' .. after
  local members = redis.call('ZRANGEBYLEX', keys[PREDICTED], low, '(' .. worker .. '\1', 'LIMIT', 0, most)
  for _, member in ipairs(members) do
    local id = string.sub(member, -ID_BYTES)
    local reservation, prediction = get_reservation(keys, id), get_prediction(keys, id)
    local computing = reservation and reservation[R_PREFILLING] == 1
    if prediction and prediction[P_MADE_US] <= then_us and not computing then
      drop_prediction(keys, id, prediction)
    end
  end
  if #members == most then
    local last = most > 0 and members[most] or after
    redis.call('ZADD', keys[DEADLINES], 0, 's' .. worker .. '\0' .. string.format('%016d', then_us) .. last)
  end
  return #members
end

-- Moves up to `most` workers whose sample is too old to the family of unknown loads. Returns how many were moved.
local function disbelieve_samples(keys, now, most)
  local old = redis.call('ZRANGEBYSCORE', keys[SAMPLES], '-inf', string.format('%d', now - STALE_US), 'LIMIT', 0, most)
  for _, worker in ipairs(old) do
    local record = find_worker(keys, worker)
    if not record then
      damaged('load')
    end
    record[BELIEVED] = 0
    put_worker(keys, worker, record)
  end
  return #old
end

-- Ends one thing that is over, and removes up to `most` reservations and predictions. Returns how many were removed, but at
-- least 1; `most` if there may be more.
local function end_one(keys, member, most, now)
  local kind, name, dropped = string.sub(member, 1, 1), string.sub(member, 2), 0
  if kind == 'l' then
    end_lease(keys, name)
  elseif kind == 'o' then
    for _, owned in ipairs(first_of(keys[OWNED], name, most)) do
      if not drop_if_there(keys, string.sub(owned, -ID_BYTES), 'r', now) then
        redis.call('ZREM', keys[OWNED], owned)
      end
      dropped = dropped + 1
    end
  elseif kind == 'w' then
    dropped = drop_former(keys, BOOKED, get_reservation, R_GENERATION, name, 'r', most, now)
    if dropped < most then
      dropped = dropped + drop_former(keys, PREDICTED, get_prediction, P_GENERATION, name, 'p', most - dropped, now)
    end
  elseif kind == 's' then
    local worker, then_us, after = string.match(name, '^([^%z]+)%z(%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d%d)(.*)$')
    redis.call('ZREM', keys[DEADLINES], member) -- what is left gets its own deadline
    if not worker then
      damaged('deadline')
    end
    return math.max(1, drop_settled(keys, worker, tonumber(then_us), after, most))
  else
    drop_if_there(keys, name, kind, now)
  end
  if dropped < most then
    redis.call('ZREM', keys[DEADLINES], member)
  end
  return math.max(1, dropped)
end

-- Ends what is over: up to SLICE reservations, predictions and samples, and requests that are waiting. Returns 1 if there may
-- be more of the former, otherwise 0.
local function purge(keys, now)
  purge_queue(keys, now)
  local left, last = SLICE, string.format('%d', now)
  local over = redis.call('ZRANGEBYSCORE', keys[DEADLINES], '-inf', last, 'LIMIT', 0, SLICE)
  while over[1] and left > 0 do
    for i = 1, #over do
      if left > 0 then
        left = left - end_one(keys, over[i], left, now)
      end
    end
    over = redis.call('ZRANGEBYSCORE', keys[DEADLINES], '-inf', last, 'LIMIT', 0, SLICE)
  end
  return (left <= 0 or disbelieve_samples(keys, now, left) == left) and 1 or 0
end
