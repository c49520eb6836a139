-- queue: a router asks which of its waiting requests may be tried now. Its requests wait for as long as it asks.
--
-- KEYS see _layout.lua
-- ARGV 1 router id
--      2 ids of requests that wait no longer, one after another
--      3 cmsgpack { rows of requests that wait, see _queue.lua... }
-- returns cmsgpack { how many of its requests wait, how many of all routers, their prompts' tokens, { ids of those rows that
-- may not wait... }, { lane, { its workers... }... }, { id, { lanes whose workers it must leave to others... }... } of its
-- requests that may be tried }
local MOST_ROWS_A_CALL, MOST_LEFT = 16, 16

register('kvatlas_pool_queue', function(keys, args)
  local router, left, rows = args[1], args[2], unpack_rows(args[3], MOST_ROWS_A_CALL)
  if #left > MOST_LEFT * ID_BYTES then
    error({ err = 'ERR argument: ' .. MOST_LEFT .. ' ids at most' })
  end
  local now = now_us()
  purge(keys, now)
  renew_queue_lease(keys, router, now)
  for at = 1, #left, ID_BYTES do
    local id = string.sub(left, at, at + ID_BYTES - 1)
    local entry = get_entry(keys, id)
    if entry then
      leave_queue(keys, id, entry, now)
    end
  end
  local refused, turns, lanes, look = {}, {}, {}, look_at_queue(keys, now)
  for i, row in ipairs(rows) do
    rows[i] = check_row(row)
  end
  for _, row in ipairs(rows) do
    if not enter_queue(keys, row, router, now) then
      refused[#refused + 1] = row.id
    end
  end
  for _, lane in ipairs(lanes_of(keys)) do
    for _, turn in ipairs(turns_of(look, lane)) do
      if turn.entry[E_ROUTER] == router then
        turns[#turns + 1], turns[#turns + 2] = turn.id, turn.ahead
      end
    end
  end
  for lane, workers in pairs(look.workers) do
    lanes[#lanes + 1], lanes[#lanes + 2] = lane, workers or {}
  end
  local own, requests, tokens = queue_number(keys, 'o' .. router), queue_sizes(keys)
  if own == 0 then
    redis.call('ZREM', keys[DEADLINES], 'q' .. router)
  end
  expire_without_workers(keys)
  return cmsgpack.pack({ own, requests, tokens, refused, lanes, turns })
end, 3, 131072)
