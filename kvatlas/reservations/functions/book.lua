-- book: evaluates offers and reserves the cheapest, or the cheapest pair, in the same call; the router's lease is renewed.
--
-- KEYS see _pool.lua
-- ARGV 1 id (16 bytes)
--      2 router id
--      3 us of the router's lease
--      4 us after which a reservation ends in any case
--      5 prompt tokens
--      6 ask, see _evaluation.lua
--      7 with a pair layout: id of the reservation on the worker that computes the prompt alone
-- returns cmsgpack, see evaluate in _evaluation.lua: the chosen offers are reserved; { 0 } if the booking was called off before

-- Updates the predictions that a reservation on this worker uses. If its events confirm nothing, they are remembered longer;
-- otherwise those that are confirmed are dropped.
local function use_predictions(keys, worker, held_steps, matches, now)
  for _, match in ipairs(matches) do
    local id, prediction = match.id, match.prediction
    if prediction[P_WORKER] == worker then
      if prediction[P_CAPACITY] > 0 then
        redis.call('ZREM', keys[PREDICTED], place(worker, prediction[P_USED_US], id))
        prediction[P_USED_US] = now
        prediction[P_ENDS_US] = math.max(prediction[P_ENDS_US], now + prediction[P_BELIEVED_US])
        redis.call('ZADD', keys[PREDICTED], 0, place(worker, now, id))
        put_prediction(keys, id, prediction)
      elseif match.whole and held_steps >= match.steps then
        drop_prediction(keys, id, prediction)
      end
    end
  end
end

-- Predicts that the worker will hold the steps of a chain from number `first` on.
local function predict(keys, id, worker, chain, first, ready_us, believed_us, capacity, now)
  local hashes = string.sub(chain, first * HASH_BYTES + 1)
  put_prediction(keys, id, { worker, ready_us, now, ready_us + believed_us, believed_us, first, capacity, hashes })
  local anchor = string.sub(hashes, 1, HASH_BYTES)
  redis.call('HSET', keys[ANCHORS], anchor, (redis.call('HGET', keys[ANCHORS], anchor) or '') .. id)
  redis.call('ZADD', keys[PREDICTED], 0, place(worker, now, id))
  local record = get_worker(keys, worker)
  record[STEPS] = record[STEPS] + #hashes / HASH_BYTES
  put_worker(keys, worker, record)
  while capacity > 0 and get_worker(keys, worker)[STEPS] > capacity do
    local low, high = '[' .. worker .. '\0', '(' .. worker .. '\1'
    local oldest = string.sub(redis.call('ZRANGEBYLEX', keys[PREDICTED], low, high, 'LIMIT', 0, 1)[1], -ID_BYTES)
    drop_prediction(keys, oldest, get_prediction(keys, oldest))
  end
end

-- Ends what was booked under this id before: the same booking was sent again. Returns false if it was called off.
local function start(keys, id, now)
  local packed = redis.call('HGET', keys[RESERVATIONS], id)
  if packed then
    local before = cmsgpack.unpack(packed)
    if before[R_WORKER] == '' then
      return false
    end
    drop_reservation(keys, id, before, false, now)
  end
  local prediction = get_prediction(keys, id)
  if prediction then
    drop_prediction(keys, id, prediction)
  end
  return true
end

-- Reserves the number-th offer. `found`: what `evaluate` returns for a booking.
local function reserve(keys, id, router, longest_us, input_tokens, ask, number, found, now)
  local kinds, offers, at = ask.kinds, ask.offers, (number - 1) * OFFER_FIELDS
  local worker, held, k = offers[at + OFFER_WORKER], offers[at + CACHED], offers[at + KIND] * KIND_FIELDS
  local cached = found.used[number] or held

  local reservation = { worker, router, now, input_tokens - cached, input_tokens, 1 }
  redis.call('HSET', keys[RESERVATIONS], id, cmsgpack.pack(reservation))
  redis.call('ZADD', keys[BOOKED], 0, place(worker, now, id))
  redis.call('ZADD', keys[DEADLINES], string.format('%d', now + longest_us), 'r' .. id)
  local record = get_worker(keys, worker)
  count(record, reservation, 1)
  put_worker(keys, worker, record)

  local chain = ask.chains[kinds[k + CHAIN]]
  if chain then
    local held_steps, matches = offers[at + HELD_STEPS], found.matches[kinds[k + CHAIN]] or {}
    local steps = held_steps
    for _, match in ipairs(matches) do
      if match.prediction[P_WORKER] == worker then
        steps = math.max(steps, match.steps)
      end
    end
    use_predictions(keys, worker, held_steps, matches, now)
    if steps * HASH_BYTES < #chain.hashes then
      local work_us = offers[at + WORK] - (worth(kinds, k, cached) - worth(kinds, k, held))
      local ready_us = now + math.ceil(found.backlog_us[number] + (found.wait_us[number] or 0) + math.max(0, work_us))
      predict(keys, id, worker, chain.hashes, steps, ready_us, kinds[k + BELIEVED_US], kinds[k + CAPACITY], now)
    end
  end
end

register('kvatlas_pool_book', function(keys, args)
  local id, router, lease_us, longest_us = args[1], args[2], tonumber(args[3]), tonumber(args[4])
  local input_tokens, ask, prefill_id = tonumber(args[5]), unpack_ask(args[6]), args[7]
  local now = now_us()
  purge(keys, now)
  redis.call('HSET', keys[ROUTERS], router, string.format('%d', now + lease_us))
  local wanted = start(keys, id, now)
  if prefill_id then
    wanted = start(keys, prefill_id, now) and wanted
  end
  if not wanted then
    expire_without_workers(keys)
    return cmsgpack.pack({ 0 })
  end
  local answer, found = evaluate(keys, ask, now)
  reserve(keys, id, router, longest_us, input_tokens, ask, found.chosen, found, now)
  if found.prefill > 0 then
    reserve(keys, prefill_id, router, longest_us, input_tokens, ask, found.prefill, found, now)
  end
  expire_without_workers(keys)
  return cmsgpack.pack(answer)
end)
