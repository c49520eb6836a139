-- book: evaluates offers and reserves the cheapest one, or the cheapest pair, in the same call; also renews the router's lease.
-- A request that may wait gets a place in the pool's queue instead if there is no room for it, or if others come first.
--
-- KEYS see _layout.lua
-- ARGV 1 id (16 bytes)
--      2 router id
--      3 us of the router's lease
--      4 us after which a reservation always ends
--      5 prompt tokens
--      6 ask, see _evaluation.lua
--      7 with a pair layout: id of the reservation on the worker that computes the prompt alone; may be empty
--      8 if the request may wait: its row, see _queue.lua
-- returns cmsgpack, see evaluate in _choice.lua. Nothing is reserved if it returns { 0 }, since the booking was cancelled
-- before; { -1 }, since there are too few look-alikes; { -4, 1 if there is no room, 2 if others come first, about how many
-- requests come first, how many wait, their prompts' tokens }; { -5, how many wait, their tokens }, since it may not wait

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

-- Records the prediction that the worker will hold the steps of the chain from number `first` on, unless too many predictions
-- begin there.
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

-- Ends what has been booked under this id before, in case the same booking is sent again. Returns false if it was cancelled.
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

local MUST_WAIT, QUEUE_IS_FULL, NO_ROOM, NOT_ITS_TURN = -4, -5, 1, 2

-- Reserves what has been chosen.
local function reserve_chosen(keys, args, owner, state, now)
  local longest_us, input_tokens = integer(args[4], 0), integer(args[5], 0)
  if state.source and redis.call('HEXISTS', keys[LOAD], state.source) == 1 then -- nothing would remove a forgotten one's entry
    redis.call('HSET', keys[SOURCES], state.source, string.format('%d', state.fetched_us))
  end
  reserve(keys, args[1], owner, longest_us, input_tokens, state, state.chosen, now)
  if state.prefill > 0 then
    reserve(keys, args[7], owner, longest_us, input_tokens, state, state.prefill, now)
  end
end

-- Gives a request its place in the queue. Returns the answer.
local function wait_in_queue(keys, row, router, why, now)
  local entered = enter_queue(keys, row, router, now)
  if entered and why == NO_ROOM then
    narrow_window(keys, row.id)
  end
  local requests, tokens = queue_sizes(keys)
  return entered and { MUST_WAIT, why, count_ahead(keys, row.id), requests, tokens } or { QUEUE_IS_FULL, requests, tokens }
end

-- Chooses and reserves for a request that may wait. Returns the answer.
local function book_in_turn(keys, args, row, owner, ask, now)
  local router, blocked = args[2], {}
  if row.may_wait and redis.call('EXISTS', keys[QUEUED_REQUESTS]) == 1 then
    if not enter_queue(keys, row, router, now) then
      return { QUEUE_IS_FULL, queue_sizes(keys) }
    end
    blocked = blocked_for(keys, row.id, now)
    if not blocked then
      return wait_in_queue(keys, row, router, NOT_ITS_TURN, now)
    end
  end
  local answer, state = evaluate(keys, ask, now)
  if state then
    if row.may_wait and state.lowest >= LEVEL_NO_ROOM then
      return wait_in_queue(keys, row, router, NO_ROOM, now)
    elseif blocked[state.workers[state.chosen]] or blocked[state.workers[state.prefill]] then
      return wait_in_queue(keys, row, router, NOT_ITS_TURN, now)
    end
    local number = state.prefill > 0 and state.prefill or state.chosen
    local cached = state.used[number] or state.rows[number][state.at[number] + CACHED]
    reserve_chosen(keys, args, owner, state, now)
    record_queue_booked(keys, row, args[1], math.max(0, integer(args[5], 0) - cached), cached, now)
  end
  return answer
end

register('kvatlas_pool_book', function(keys, args)
  local id, router, lease_us, ask, prefill_id = args[1], args[2], integer(args[3], 0), unpack_ask(args[6]), args[7]
  local row = args[8] and check_row(cmsgpack.unpack(args[8]))
  local now = now_us()
  local owner = renew_lease(keys, router, lease_us, now)
  purge(keys, now)
  local wanted = start(keys, id, now)
  if prefill_id and prefill_id ~= '' then
    wanted = start(keys, prefill_id, now) and wanted
  end
  local answer, state = { 0 }
  if wanted and row then
    answer = book_in_turn(keys, args, row, owner, ask, now)
  elseif wanted then
    answer, state = evaluate(keys, ask, now)
    if state then
      reserve_chosen(keys, args, owner, state, now)
    end
  end
  expire_without_workers(keys)
  return cmsgpack.pack(answer or { -1 })
end, 8, MOST_ASK)
