-- queue: a router asks which of its waiting requests may be tried now. Its requests wait for as long as it asks.
--
-- KEYS see _layout.lua
-- ARGV 1 router id
--      2 ids of requests that wait no longer, one after another
--      3 cmsgpack { rows of requests that wait, see _queue.lua... }
--      4 1 to look for turns; 0 if another call follows
-- returns cmsgpack { how many of its requests wait, how many of all routers, their prompts' tokens, { ids of those rows that
-- may not wait... }, 1 if one of its requests may be tried soon, { packed list of the workers of each lane whose first request
-- comes first... }, { id, how many of these lanes' workers it must leave to them, number of its own lane among them (0:
-- none)... } of its requests that may be tried }
local MOST_ROWS_A_CALL, MOST_LEFT = 8, 16

register('kvatlas_pool_queue', function(keys, args)
  local router, left, rows = args[1], args[2], unpack_rows(args[3], MOST_ROWS_A_CALL)
  if #left > MOST_LEFT * ID_BYTES then
    error({ err = 'ERR argument: ' .. MOST_LEFT .. ' ids at most' })
  end
  local now = now_us()
  purge(keys, now)
  renew_queue_lease(keys, router, now)
  local gone, seen = {}, {}
  for at = 1, #left, ID_BYTES do
    local id = string.sub(left, at, at + ID_BYTES - 1)
    local entry = not seen[id] and get_entry(keys, id)
    seen[id] = true
    gone[#gone + 1] = entry and { id = id, entry = entry } or nil
  end
  leave_queue(keys, gone, now)
  local refused, turns, lanes, near, look = {}, {}, {}, 0, look_at_queue(keys, now)
  for i, row in ipairs(rows) do
    rows[i] = check_row(row)
  end
  for _, row in ipairs(rows) do
    if not enter_queue(keys, row, router, now) then
      refused[#refused + 1] = row.id
    end
  end
  local items = args[4] ~= '0' and first_of_lanes(look, true) or {}
  local found, order = turns_of(look, items)
  for _, one in ipairs(items) do
    near = one.entry[E_ROUTER] == router and 1 or near
  end
  local most = 0
  for _, turn in ipairs(found) do
    if turn[2] == router then
      most, turns[#turns + 1], turns[#turns + 2], turns[#turns + 3] = turn[3], turn[1], turn[3], turn[4]
    end
  end
  for i = 1, most do
    lanes[i] = look.packed_workers[order[i]]
  end
  local own, requests, tokens = queue_number(keys, 'o' .. router), queue_sizes(keys)
  if own == 0 then
    redis.call('ZREM', keys[QUEUE_DEADLINES], 'q' .. router)
  end
  expire_without_workers(keys)
  return cmsgpack.pack({ own, requests, tokens, refused, near, lanes, turns })
end, 4, 131072)
