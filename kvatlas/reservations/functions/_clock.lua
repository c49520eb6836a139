-- The store's own clock, in microseconds; it is used because the clocks of routers and indexers differ.

local function now_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end
