-- What the workers in one row of look-alikes cost without load if they hold this many blocks. See _lookup.lua.
--
-- row: { at = place of its offer, k = place of its kind, kind = number of that, chain (nil: its workers hold no block of the
-- prompt), step_tokens = those of its predictions' steps (nil: none are made), least_us = results so far, by blocks;
-- otherwise the fields of the row's reuse, offer and kind }

local REUSE_CHAIN, MOST_TOKENS, LOST_TOKENS, LOSES_FIRST, SHARE, UNIT, REUSE_FIELDS = 1, 2, 3, 4, 5, 6, 6
local NEARLY_US = 0.001 -- sums of the same numbers in another order differ by less

local function open_row(state, at)
  local ask, r = state.ask, at / OFFER_FIELDS * REUSE_FIELDS
  local kinds, rows, reuse = ask.kinds, ask.look_alikes, ask.lookup.reuse
  local kind = rows[at + KIND]
  local k = kind * KIND_FIELDS
  local chain, steps = state.chains[reuse[r + REUSE_CHAIN]], ask.chains[kinds[k + CHAIN]]
  return {
    at = at, k = k, kind = kind, chain = chain, step_tokens = chain and steps and steps.step_tokens, least_us = {},
    most = reuse[r + MOST_TOKENS], lost = reuse[r + LOST_TOKENS], loses_first = reuse[r + LOSES_FIRST] == 1,
    share = reuse[r + SHARE], unit = reuse[r + UNIT], base_us = rows[at + BASE], work_us = rows[at + WORK],
    kinds = kinds, in_flight = state.in_flight, again_factor = ask.again_factor,
    again_us = worth(kinds, k, state.in_flight),
  }
end

-- Returns how many tokens a worker uses if it holds this many blocks.
local function cached_at(row, depth)
  if not row.chain then
    return 0
  end
  local usable, most, lost = depth * row.chain.tokens, row.most, row.lost
  if row.loses_first then
    usable = usable - lost
    usable = usable < most and usable or most
  else
    usable = (usable < most and usable or most) - lost
  end
  if row.share < 1 then
    usable = math.floor(usable * row.share)
  end
  usable = usable - usable % row.unit
  return usable > 0 and usable or 0
end

-- Returns the least that it costs without load if it uses no more than this many tokens.
local function least_with(row, cached)
  local saved, again_us = worth(row.kinds, row.k, cached), row.again_us
  saved = saved > 0 and saved or 0 -- a small hit may cost more than it saves
  local least_us = row.base_us - saved
  if row.in_flight > cached and again_us > saved then
    least_us = least_us + row.again_factor * (again_us - saved)
  end
  return least_us + row.again_factor * math.min(0, again_us)
end

-- Returns the least that it costs without load if it holds no more blocks.
local function least_at(row, depth)
  local least_us = row.least_us[depth]
  if not least_us then
    least_us = least_with(row, cached_at(row, depth))
    row.least_us[depth] = least_us
  end
  return least_us
end

-- Returns the largest number of blocks that workers of a row that have not been weighed may hold.
local function most_of(row)
  return row.chain and row.chain.most or 0
end

-- Returns the least us that such a worker computes before the first token, if it uses no more than this many tokens.
local function least_work(row, cached)
  return row.work_us - math.max(0, worth(row.kinds, row.k, cached))
end

-- Returns the number of blocks from which on a worker of a row may be the cheapest if its load costs at least this;
-- nil: never.
local function blocks_needed(state, row, load_us)
  local low, high, left_us = 1, most_of(row), state.least - load_us + NEARLY_US
  if state.lowest > 0 or least_at(row, 0) <= left_us then
    return 0
  elseif least_at(row, high) > left_us then
    return nil
  end
  while low < high do
    local middle = math.floor((low + high) / 2)
    if least_at(row, middle) > left_us then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end
