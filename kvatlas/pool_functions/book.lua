-- book: weigh offers and reserve the cheapest, or the cheapest pair, in the same call; the router's lease is renewed.
-- KEYS: see _pool.lua
-- ARGV: id (16 bytes), router id, us of the router's lease, us after which a reservation ends in any case, prompt tokens,
--   ask (see _weigh.lua), with a pairing: id of the reservation of the worker that computes the prompt alone
-- returns cmsgpack { number of the reserved offer, weighed, number of the one reserved for the prompt alone (0: none), judged };
--   the first number is 0 where the booking was called off before

-- Of an engine that confirms nothing, what was used now is remembered longer; of others, what is confirmed is forgotten.
local function after_use(keys, offer, met, now)
  for _, one in ipairs(met) do
    local id, prediction = one[1], one[2]
    if prediction[1] == offer[OFFER_WORKER] then
      if prediction[7] > 0 then
        redis.call('ZREM', keys[PREDICTED], place(prediction[1], prediction[3], id))
        prediction[3], prediction[4] = now, math.max(prediction[4], now + prediction[5])
        redis.call('ZADD', keys[PREDICTED], 0, place(prediction[1], now, id))
        put_prediction(keys, id, prediction)
      elseif one[4] and offer[HELD_STEPS] >= one[3] then
        drop_prediction(keys, id, prediction)
      end
    end
  end
end

local function predict(keys, id, offer, chain, first, ready, now)
  local worker, capacity = offer[OFFER_WORKER], offer[CAPACITY]
  local hashes = string.sub(chain, first * HASH_BYTES + 1)
  local prediction = { worker, ready, now, ready + offer[BELIEVED_US], offer[BELIEVED_US], first, capacity, hashes }
  put_prediction(keys, id, prediction)
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

-- Ends what was booked under this id before: the same booking told again. False where it was called off.
local function start(keys, id, now)
  local packed = redis.call('HGET', keys[RESERVATIONS], id)
  if packed then
    local before = cmsgpack.unpack(packed)
    if before[1] == '' then
      return false
    end
    drop_reservation(keys, id, before, false, now)
  end
  local predicted = get_prediction(keys, id)
  if predicted then
    drop_prediction(keys, id, predicted)
  end
  return true
end

-- Reserves the number-th offer.
local function reserve(keys, id, router, longest_us, input_tokens, ask, number, weighed, met, now)
  local offer, seen = row(ask[4], number, OFFER_FIELDS), row(weighed, number, WEIGHED_FIELDS)
  local worker, used, wait_us = offer[OFFER_WORKER], seen[6], seen[7]
  local cached = used > 0 and used or offer[CACHED]

  local reservation = { worker, router, now, input_tokens - cached, input_tokens, 1 }
  redis.call('HSET', keys[RESERVATIONS], id, cmsgpack.pack(reservation))
  redis.call('ZADD', keys[BOOKED], 0, place(worker, now, id))
  redis.call('ZADD', keys[DEADLINES], string.format('%d', now + longest_us), 'r' .. id)
  local record = get_worker(keys, worker)
  count(record, reservation, 1)
  put_worker(keys, worker, record)

  local chain = ask[3][offer[CHAIN]]
  if chain then
    local steps = offer[HELD_STEPS]
    for _, one in ipairs(met[offer[CHAIN]] or {}) do
      if one[2][1] == worker then
        steps = math.max(steps, one[3])
      end
    end
    after_use(keys, offer, met[offer[CHAIN]] or {}, now)
    if steps * HASH_BYTES < #chain[2] then
      local backlog_us = offer[QUEUED_US] * (seen[1] + seen[3] * offer[WAITING_TOKENS])
      local work_us = offer[WORK] - (worth(offer, 0, cached) - worth(offer, 0, offer[CACHED]))
      local ready = now + math.ceil(backlog_us + wait_us + math.max(0, work_us))
      predict(keys, id, offer, chain[2], steps, ready, now)
    end
  end
end

register('kvatlas_pool_book', function(keys, args)
  local id, router, longest_us, input_tokens = args[1], args[2], tonumber(args[4]), tonumber(args[5])
  local ask, prefill_id = cmsgpack.unpack(args[6]), args[7]
  local now = now_us()
  purge(keys, now)
  redis.call('HSET', keys[ROUTERS], router, string.format('%d', now + tonumber(args[3])))
  local wanted = start(keys, id, now)
  if prefill_id then
    wanted = start(keys, prefill_id, now) and wanted
  end
  if not wanted then
    keep_shortly(keys)
    return cmsgpack.pack({ 0, {}, 0, {} })
  end
  local chosen, weighed, met, prefill, judged = weigh(keys, ask, now)
  reserve(keys, id, router, longest_us, input_tokens, ask, chosen, weighed, met, now)
  if prefill > 0 then
    reserve(keys, prefill_id, router, longest_us, input_tokens, ask, prefill, weighed, met, now)
  end
  keep_shortly(keys)
  return cmsgpack.pack({ chosen, weighed, prefill, judged })
end)
