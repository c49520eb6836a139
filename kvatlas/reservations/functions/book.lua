-- book: evaluates offers and reserves the cheapest one, or the cheapest pair, in the same call; also renews the router's lease.
--
-- KEYS see _layout.lua
-- ARGV 1 id (16 bytes)
--      2 router id
--      3 us of the router's lease
--      4 us after which a reservation ends in any case
--      5 prompt tokens
--      6 ask, see _evaluation.lua
--      7 with a pair layout: id of the reservation on the worker that computes the prompt alone
-- returns cmsgpack, see evaluate in _choice.lua. Nothing is reserved if it returns { 0 }, since the booking was cancelled
-- before, or { -1 }, since there are too few look-alikes

-- Updates the worker's predictions that a reservation uses. If the worker has no events, they are believed for longer;
-- otherwise those that its events confirmed are dropped.
local function use_predictions(keys, worker, held_steps, matches, now)
  for _, match in ipairs(matches) do
    local id, prediction = match.id, match.prediction
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

-- Predicts that the worker will hold the steps of a chain from number `first` on, unless too many predictions begin there.
local function predict(keys, id, worker, record, chain, first, ready_us, believed_us, capacity, now)
  local hashes = string.sub(chain, first * HASH_BYTES + 1)
  local anchor = string.sub(hashes, 1, HASH_BYTES)
  local ids = redis.call('HGET', keys[ANCHORS], anchor) or ''
  if #ids >= MOST_ANCHORED * ID_BYTES then
    return
  end
  put_prediction(
    keys, id,
    { worker, ready_us, now, ready_us + believed_us, believed_us, first, capacity, hashes, record[GENERATION], now }
  )
  redis.call('HSET', keys[ANCHORS], anchor, ids .. id)
  redis.call('ZADD', keys[PREDICTED], 0, place(worker, now, id))
  record[STEPS] = record[STEPS] + #hashes / HASH_BYTES
  local most = SLICE -- the next booking drops the rest
  while capacity > 0 and most > 0 and record[STEPS] > capacity do
    put_worker(keys, worker, record)
    local first_used = first_of(keys[PREDICTED], worker, 1)[1]
    local oldest = first_used and string.sub(first_used, -ID_BYTES)
    local prediction = oldest and get_prediction(keys, oldest)
    if not prediction then
      damaged('prediction')
    end
    drop_prediction(keys, oldest, prediction)
    local after = find_worker(keys, worker)
    record[STEPS], record.packed, most = after[STEPS], after.packed, most - 1
  end
end

-- Ends what was booked under this id before, in case the same booking is sent again. Returns false if it was cancelled.
local function start(keys, id, now)
  local before = get_reservation(keys, id)
  if before then
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

-- Reserves the number-th offer. `state`: see `evaluate`.
local function reserve(keys, id, owner, longest_us, input_tokens, state, number, now)
  local ask, offers, at, worker = state.ask, state.rows[number], state.at[number], state.workers[number]
  local kinds, held, k = ask.kinds, offers[at + CACHED], offers[at + KIND] * KIND_FIELDS
  local cached = state.used[number] or held

  local record = get_worker(keys, worker)
  local reservation = { worker, owner, now, input_tokens - cached, input_tokens, 1, record[GENERATION] }
  redis.call('HSET', keys[RESERVATIONS], id, cmsgpack.pack(reservation))
  redis.call('ZADD', keys[BOOKED], 0, place(worker, now, id))
  redis.call('ZADD', keys[OWNED], 0, owner .. '\0' .. id)
  redis.call('ZADD', keys[DEADLINES], string.format('%d', now + longest_us), 'r' .. id)
  count(record, reservation, 1)

  local chain = ask.chains[kinds[k + CHAIN]]
  if chain then
    local held_steps, matches = offers[at + HELD_STEPS], state.matches[kinds[k + CHAIN]] or {}
    local steps, mine = held_steps, {}
    for _, match in ipairs(matches) do
      if match.prediction[P_WORKER] == worker then
        steps, mine[#mine + 1] = math.max(steps, match.steps), match
      end
    end
    if mine[1] then
      put_worker(keys, worker, record)
      use_predictions(keys, worker, held_steps, mine, now)
      record = get_worker(keys, worker)
    end
    if steps * HASH_BYTES < #chain.hashes then
      local work_us = offers[at + WORK] - (worth(kinds, k, cached) - worth(kinds, k, held))
      local ready_us = now + math.ceil(state.backlog_us[number] + (state.wait_us[number] or 0) + math.max(0, work_us))
      predict(keys, id, worker, record, chain.hashes, steps, ready_us, kinds[k + BELIEVED_US], kinds[k + CAPACITY], now)
    end
  end
  put_worker(keys, worker, record)
end

register('kvatlas_pool_book', function(keys, args)
  local id, router, lease_us, longest_us = args[1], args[2], integer(args[3], 0), integer(args[4], 0)
  local input_tokens, ask, prefill_id = integer(args[5], 0), unpack_ask(args[6]), args[7]
  local now = now_us()
  local owner = renew_lease(keys, router, lease_us, now)
  purge(keys, now)
  local wanted = start(keys, id, now)
  if prefill_id then
    wanted = start(keys, prefill_id, now) and wanted
  end
  local answer, state = { 0 }
  if wanted then
    answer, state = evaluate(keys, ask, now)
    if state then
      if state.source and redis.call('HEXISTS', keys[LOAD], state.source) == 1 then -- nothing would remove a forgotten one
        redis.call('HSET', keys[SOURCES], state.source, string.format('%d', state.fetched_us))
      end
      reserve(keys, id, owner, longest_us, input_tokens, state, state.chosen, now)
      if state.prefill > 0 then
        reserve(keys, prefill_id, owner, longest_us, input_tokens, state, state.prefill, now)
      end
    end
  end
  expire_without_workers(keys)
  return cmsgpack.pack(answer or { -1 })
end, 7, MOST_ASK)
