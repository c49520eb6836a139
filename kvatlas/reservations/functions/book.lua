-- book: weigh offers and reserve the cheapest, or the cheapest pair, in the same call; the router's lease is renewed.
-- KEYS: see _pool.lua
-- ARGV: id (16 bytes), router id, us of the router's lease, us after which a reservation ends in any case, prompt tokens,
--   ask (see _weigh.lua), with a pairing: id of the reservation of the worker that computes the prompt alone
-- returns cmsgpack, see _weigh.lua; what is chosen is reserved; { 0 } where the booking was called off before

-- Of an engine that confirms nothing, what was used now is remembered longer; of others, what is confirmed is forgotten.
local function after_use(keys, worker, held_steps, met, now)
  for _, one in ipairs(met) do
    local id, prediction = one[1], one[2]
    if prediction[1] == worker then
      if prediction[7] > 0 then
        redis.call('ZREM', keys[PREDICTED], place(prediction[1], prediction[3], id))
        prediction[3], prediction[4] = now, math.max(prediction[4], now + prediction[5])
        redis.call('ZADD', keys[PREDICTED], 0, place(prediction[1], now, id))
        put_prediction(keys, id, prediction)
      elseif one[4] and held_steps >= one[3] then
        drop_prediction(keys, id, prediction)
      end
    end
  end
end

-- What a reservation leaves: the steps of a chain from number `first` on.
local function predict(keys, id, worker, chain, first, ready, believed_us, capacity, now)
  local hashes = string.sub(chain, first * HASH_BYTES + 1)
  local prediction = { worker, ready, now, ready + believed_us, believed_us, first, capacity, hashes }
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

-- Reserves the number-th offer. `seen`, `met`: as `weigh` returns them.
local function reserve(keys, id, router, longest_us, input_tokens, ask, number, seen, met, now)
  local chains, kinds, offers, at = ask[3], ask[4], ask[5], (number - 1) * OFFER_FIELDS
  local worker, held, k = offers[at + OFFER_WORKER], offers[at + CACHED], offers[at + KIND] * KIND_FIELDS
  local cached = seen.used[number] or held

  local reservation = { worker, router, now, input_tokens - cached, input_tokens, 1 }
  redis.call('HSET', keys[RESERVATIONS], id, cmsgpack.pack(reservation))
  redis.call('ZADD', keys[BOOKED], 0, place(worker, now, id))
  redis.call('ZADD', keys[DEADLINES], string.format('%d', now + longest_us), 'r' .. id)
  local record = get_worker(keys, worker)
  count(record, reservation, 1)
  put_worker(keys, worker, record)

  local chain = chains[kinds[k + CHAIN]]
  if chain then
    local held_steps, mine = offers[at + HELD_STEPS], met[kinds[k + CHAIN]] or {}
    local steps = held_steps
    for _, one in ipairs(mine) do
      if one[2][1] == worker then
        steps = math.max(steps, one[3])
      end
    end
    after_use(keys, worker, held_steps, mine, now)
    if steps * HASH_BYTES < #chain[2] then
      local work_us = offers[at + WORK] - (worth(kinds, k, cached) - worth(kinds, k, held))
      local ready = now + math.ceil(seen.backlog_us[number] + (seen.wait_us[number] or 0) + math.max(0, work_us))
      predict(keys, id, worker, chain[2], steps, ready, kinds[k + BELIEVED_US], kinds[k + CAPACITY], now)
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
    return cmsgpack.pack({ 0 })
  end
  local answer, seen, met = weigh(keys, ask, now)
  reserve(keys, id, router, longest_us, input_tokens, ask, answer[1], seen, met, now)
  if answer[2] > 0 then
    reserve(keys, prefill_id, router, longest_us, input_tokens, ask, answer[2], seen, met, now)
  end
  keep_shortly(keys)
  return cmsgpack.pack(answer)
end)
