-- What bookings cost the tenants whose requests are waiting (`_queue.lua`).

local PROGRAM_US, MOST_CHARGES = 300000000, 65536
local CHARGE = '^(%x+) (%d+) (%d+) (%d+)$'

-- Records that a request was booked. If it or others waited, its tenant is charged.
local function record_queue_booked(keys, row, booking, uncached, cached, now)
  if row.program ~= '' then
    redis.call('ZADD', keys[QUEUE_DEADLINES], string.format('%d', now + PROGRAM_US), 'a' .. row.tenant .. row.program)
  end
  if redis.call('EXISTS', keys[QUEUED_REQUESTS]) == 0 then
    return
  end
  local account, entry = account_of(row, row.tenant), get_entry(keys, row.id)
  if entry then
    account = string.sub(entry[E_LINE], ACCOUNT_AT)
    local window = 'k' .. string.sub(entry[E_LINE], 1, LANE_END)
    redis.call('HSET', keys[QUEUE_NUMBERS], window, math.min(MOST_WINDOW, 2 * math.max(1, queue_number(keys, window))))
    leave_one(keys, row.id, entry, now)
  end
  local before, rank = counter_of(keys, account), string.sub(account, 1, 8)
  local units = service_units(uncached, cached, row.output)
  set_counter(keys, account, before + math.floor(units * 1000 / row.weight))
  local served = tonumber(redis.call('HGET', keys[QUEUE_COUNTERS], 'v' .. rank) or 0) or 0
  redis.call('HSET', keys[QUEUE_COUNTERS], 'v' .. rank, string.format('%d', math.max(served, before)))
  if redis.call('HLEN', keys[QUEUE_CHARGES]) >= MOST_CHARGES then
    redis.call('UNLINK', keys[QUEUE_CHARGES])
  end
  local charge = string.format('%s %d %d %d', account, row.weight, row.output, units)
  redis.call('HSET', keys[QUEUE_CHARGES], booking, charge)
end

-- Records that a booking has ended. `output`: the number of tokens that its answer took, in place of the estimate; nil:
-- unknown. If it was called off, nothing is charged.
local function record_queue_end(keys, booking, output, called_off)
  local charge = redis.call('HGET', keys[QUEUE_CHARGES], booking)
  if not charge then
    return
  end
  redis.call('HDEL', keys[QUEUE_CHARGES], booking)
  local account, weight, expected, units = string.match(charge, CHARGE)
  if not account or #account ~= ACCOUNT_BYTES or tonumber(weight) < 1 then
    damaged('charge')
  end
  if (output or called_off) and redis.call('HEXISTS', keys[QUEUE_COUNTERS], 'c' .. account) == 1 then
    local more = called_off and -units or OUTPUT_UNITS * (output - expected)
    set_counter(keys, account, counter_of(keys, account) + math.floor(more * 1000 / weight))
  end
end
