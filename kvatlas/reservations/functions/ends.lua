-- ends: records progress of reservations. With the first token, the prompt is computed: it is no longer queued, and the
-- predicted blocks are held from now on. Otherwise the reservation ends; if it already has, nothing changes.
--
-- KEYS see _layout.lua
-- ARGV 1 us for which a booking that was cancelled is refused if it arrives later
--      2... id, outcome (OUTCOME; '': the first token has arrived), output tokens ('': unknown)...
-- returns 1 for each; 0 if there is no such reservation, or its first token was already recorded

local function record_first_token(keys, id, reservation, now)
  local worker = reservation[R_WORKER]
  local record = find_worker(keys, worker)
  if not record or record[GENERATION] ~= reservation[R_GENERATION] or reservation[R_PREFILLING] ~= 1 then
    return false
  end
  count(record, reservation, -1)
  reservation[R_QUEUED], reservation[R_PREFILLING] = 0, 0
  count(record, reservation, 1)
  put_worker(keys, worker, record)
  redis.call('HSET', keys[RESERVATIONS], id, cmsgpack.pack(reservation))
  settle_prediction(keys, id, now)
  return true
end

register('kvatlas_pool_ends', function(keys, args)
  local refused_us, now, found = integer(args[1], 0), now_us(), {}
  for i = 2, #args, 3 do
    local id, outcome, output = args[i], args[i + 1], args[i + 2]
    local reservation, known = get_reservation(keys, id), false
    if reservation and reservation[R_WORKER] ~= '' then
      if outcome == '' then
        known = record_first_token(keys, id, reservation, now)
      else
        local tokens = output ~= '' and integer(output, 0, MOST_COUNTED) or nil
        known = drop_reservation(keys, id, reservation, outcome, now, tokens)
      end
    end
    if outcome == OUTCOME.called_off then
      redis.call('HSET', keys[RESERVATIONS], id, cmsgpack.pack({ '', '', 0, 0, 0, 0, 0 }))
      redis.call('ZADD', keys[DEADLINES], string.format('%d', now + refused_us), 'r' .. id)
      expire_without_workers(keys)
    end
    found[#found + 1] = known and 1 or 0
  end
  return found
end, 129)
