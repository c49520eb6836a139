-- The fence: applies one worker's messages if its record says that they are the next ones. The record is read in the same call
-- and never taken from the caller, so a replay, a zombie or a second owner can't change anything.
--
-- self: one worker of the call: {c = the call, see _apply.lua; worker = id; record; uses = {incarnation -> {scope id -> 8 bytes
--   for each of its entries in touched, without the scope id}}}
-- event: as on the bus (kvatlas/bus/wire.py); if it has hashes, their two sums follow

local CODE = {
  stored = 1, removed = 2, cleared = 3, begin = 4, chunk = 5, ending = 6, checkpoint = 7, marked = 8, unmarked = 9, heads = 10,
}
local EVENT_CODE, EVENT_SCOPE, EVENT_TIER, EVENT_HASHES, EVENT_PARENT = 1, 2, 3, 4, 5
local STORED_LOW, STORED_HIGH, REMOVED_LOW, REMOVED_HIGH = 8, 9, 5, 6
local END_CHUNKS, END_DIGEST, CHECKPOINT_DIGEST = 2, 3, 2
local BEGIN_DROPPED, MARK_HASHES, HEAD_BITS = 2, 3, 4
local UNKNOWN_BYTES = '\0\0\0\0' -- follows the block size if it is unknown how many bytes a block has

-- Carries out the queued operations of all workers.
local function flush(c)
  for _, scope in pairs(c.scopes) do
    if scope.queue[1] then
      change_blocks(scope, scope.queue, c.count)
      for _, op in ipairs(scope.queue) do
        local field = held_field(op.holder, scope.id, op.tier)
        c.held[field] = (c.held[field] or 0) + op.changed
      end
      scope.queue = {}
    end
  end
end

-- Returns a holder's digest, including changes by this call.
local function digest_for(c, holder)
  local digest = c.digests[holder]
  if not digest then
    digest = digest_of(c.stored_digests[holder])
    c.digests[holder] = digest
  end
  return digest
end

-- Returns the entries of a scope in touched: `stored`, updated with those sizes in `use` that are known.
local function with_sizes(scope_id, stored, use)
  local by_tier, merged = {}, {}
  for at = 9, #stored, 16 do
    by_tier[string.byte(stored, at)] = string.sub(stored, at, at + 7)
  end
  for at = 1, #use, 8 do
    if stored == '' or string.sub(use, at + 4, at + 7) ~= UNKNOWN_BYTES then
      by_tier[string.byte(use, at)] = string.sub(use, at, at + 7)
    end
  end
  for tier = 0, 4 do
    merged[#merged + 1] = by_tier[tier] and scope_id .. by_tier[tier]
  end
  return table.concat(merged)
end

-- Records that the holder has blocks of this scope, so that a sweep looks there, and the sizes that its messages last gave.
local function touch(self, holder, scope_id)
  local c = self.c
  local new = c.newly_touched[holder] or { known = {} }
  c.newly_touched[holder] = new
  if new.known[scope_id] then
    return
  end
  new.known[scope_id] = true
  local touched = c.touched[holder] or ''
  local at = string.find(touched, scope_id, 1, true)
  while at and at % 16 ~= 1 do
    at = string.find(touched, scope_id, at + 1, true)
  end
  local use = self.uses[self.record[INCARNATION]][scope_id]
  if not at then
    new[#new + 1] = with_sizes(scope_id, '', use)
    return
  end
  local last = at + 15
  while string.sub(touched, last + 1, last + 8) == scope_id do
    last = last + 16
  end
  local stored = string.sub(touched, at, last)
  local sizes = stored == scope_id .. use and stored or with_sizes(scope_id, stored, use)
  if sizes ~= stored then
    c.touched[holder] = string.sub(touched, 1, at - 1) .. sizes .. string.sub(touched, last + 1)
    new.resized = true
  end
end

-- Queues a change. The blocks of several workers are changed together or, if two operations may have a block in common, one
-- after the other.
local function queue(self, holder, event, store)
  local scope_id, tier, hashes = event[EVENT_SCOPE], event[EVENT_TIER], event[EVENT_HASHES]
  local size, low, high = #hashes / 8, event[REMOVED_LOW], event[REMOVED_HIGH]
  if store then
    low, high = event[STORED_LOW], event[STORED_HIGH]
  end
  local scope = self.c.scopes[scope_id]
  local op = scope.queue[#scope.queue]
  if op then
    if op.holder == holder and op.store == store and op.tier == tier then
      op.parts[#op.parts + 1] = hashes
      op.size, op.low, op.high = op.size + size, op.low + low, op.high + high
      return
    end
    if scope.in_order then
      flush(self.c)
    end
  end
  op = {
    scope = scope, holder = holder, tier = tier, tier_bit = 2 ^ tier, store = store,
    digest = digest_for(self.c, holder), parts = { hashes }, size = size, low = low, high = high, known = {},
  }
  scope.queue[#scope.queue + 1] = op
  if store then
    touch(self, holder, scope_id)
  end
end

-- Records in the side index, if it is on, that the event's blocks follow each other.
local function link_blocks(self, event)
  local side = self.c.scopes[event[EVENT_SCOPE]].side
  if side then
    local parent = event[EVENT_PARENT] or ''
    for _, hash in ipairs(split(event[EVENT_HASHES])) do
      link(side, hash, parent)
      parent = hash
    end
  end
end

-- Returns true if the holder has exactly the blocks (and the marks, if any) of this digest.
local function is_digest_of(c, holder, expected)
  local digest, marks = digest_for(c, holder), marks_for(c, holder)
  for i = 1, DIGEST_WORDS do
    if digest[i] ~= expected[i] then
      return false
    end
  end
  for i = DIGEST_WORDS + 1, math.max(#expected, marks and DIGEST_WORDS + #marks.words or 0) do
    if not marks or marks.words[i - DIGEST_WORDS] ~= expected[i] then
      return false
    end
  end
  return true
end

-- Remembers the highest message that could not be applied.
local function want(record, incarnation, seq)
  if below(record[WANT_INCARNATION], incarnation) then
    record[WANT_INCARNATION], record[WANT_SEQ] = incarnation, seq
  elseif record[WANT_INCARNATION] == incarnation and record[WANT_SEQ] < seq then
    record[WANT_SEQ] = seq
  end
end

local function close(self)
  close_worker(self.c.k, self.record, self.worker)
end

-- Closes the worker because there is no memory or no holder number for it. The indexer requests a snapshot when there is room
-- again.
local function close_without_room(self)
  self.record[OOM] = 1
  close(self)
  return false
end

-- Returns the holder that events change, which is the loading one during a snapshot; '' if there is none.
local function changing_holder(record)
  return record[LOADING] ~= '' and record[LOADING] or record[ACTIVE]
end

-- The action for each event code. It returns false if it closed the worker.
local act = {}

act[CODE.stored] = function(self, event)
  local holder = changing_holder(self.record)
  if self.c.oom then
    return close_without_room(self)
  end
  if holder == '' then
    close(self)
    return false
  end
  queue(self, holder, event, true)
  link_blocks(self, event)
  return true
end

act[CODE.chunk] = function(self, event)
  if self.record[LOADING] == '' then
    close(self)
    return false
  end
  self.record[CHUNKS] = self.record[CHUNKS] + 1
  return act[CODE.stored](self, event)
end

act[CODE.removed] = function(self, event)
  local holder = changing_holder(self.record)
  if holder == '' then
    close(self)
    return false
  end
  queue(self, holder, event, false)
  return true
end

act[CODE.cleared] = function(self)
  local record, k = self.record, self.c.k
  local slot, state = ACTIVE, ACTIVE_STATE
  if record[LOADING] ~= '' then
    slot, state = LOADING, LOADING_STATE
  end
  local marks = record[slot] ~= '' and marks_for(self.c, record[slot])
  retire_holder(k, record[slot], self.worker)
  record[slot] = allocate(k, state, self.worker, self.c.reuse_ms) or ''
  if record[slot] == '' then
    return close_without_room(self)
  end
  self.c.marks[record[slot]] = marks and new_marks(marks.dropped)
  return true
end

act[CODE.begin] = function(self, event)
  local record, k = self.record, self.c.k
  if self.seq ~= 0 then -- only the first message of an incarnation may begin a snapshot
    close(self)
    return false
  end
  retire_holder(k, record[LOADING], self.worker)
  record[LOADING] = allocate(k, LOADING_STATE, self.worker, self.c.reuse_ms) or ''
  record[CHUNKS] = 0
  if record[LOADING] == '' then
    return close_without_room(self)
  end
  self.c.marks[record[LOADING]] = event[BEGIN_DROPPED] and new_marks(event[BEGIN_DROPPED]) or false
  return true
end

act[CODE.ending] = function(self, event)
  flush(self.c)
  local record, k = self.record, self.c.k
  if record[LOADING] == '' then
    close(self)
    return false
  end
  if record[CHUNKS] ~= event[END_CHUNKS] or not is_digest_of(self.c, record[LOADING], event[END_DIGEST]) then
    -- the blocks of the last incarnation can be found until the next snapshot is complete
    self.c.count.failed_checks = self.c.count.failed_checks + 1
    retire_holder(k, record[LOADING], self.worker)
    record[LOADING], record[BAD], record[CLOSED] = '', 1, 1
    return false
  end
  retire_holder(k, record[ACTIVE], self.worker)
  activate_holder(k, record[LOADING], self.worker)
  record[ACTIVE], record[LOADING] = record[LOADING], ''
  return true
end

act[CODE.checkpoint] = function(self, event)
  flush(self.c)
  local holder = changing_holder(self.record)
  if holder == '' or not is_digest_of(self.c, holder, event[CHECKPOINT_DIGEST]) then
    self.c.count.failed_checks = self.c.count.failed_checks + 1
    self.record[BAD] = 1
  end
  return true
end

-- Carries out an event about marks by calling `change` with the scope's marks, the scope, the holder and the holder's marks.
local function change_marks_of(self, event, change)
  local holder = changing_holder(self.record)
  local marks = holder ~= '' and marks_for(self.c, holder)
  if not marks then -- the worker has no marks, or no holder
    close(self)
    return false
  end
  local scope = self.c.scopes[event[EVENT_SCOPE]]
  touch(self, holder, event[EVENT_SCOPE])
  change(scope.marks, scope, holder, marks)
  return true
end

act[CODE.marked] = function(self, event)
  if self.c.oom then
    return close_without_room(self)
  end
  return change_marks_of(self, event, function(key, scope, holder, marks)
    change_marks(key, scope, holder, marks, event[MARK_HASHES], true)
  end)
end

act[CODE.unmarked] = function(self, event)
  return change_marks_of(self, event, function(key, scope, holder, marks)
    change_marks(key, scope, holder, marks, event[MARK_HASHES], false)
  end)
end

act[CODE.heads] = function(self, event)
  if self.c.oom then
    return close_without_room(self)
  end
  return change_marks_of(self, event, function(key, scope, holder, marks)
    change_heads(key, scope, holder, marks, event[MARK_HASHES], event[HEAD_BITS])
  end)
end

-- Applies consecutive messages (seq `first` to `last`, joined by apply_call.py), or a part of one message, if they are the next
-- ones of the newest incarnation. If the record's seq lies among them, applying the first ones again changes nothing. A part
-- consists of the events from step `from` on; `ending` is 1 if the message ends with them; `ends` gives the step after each
-- event. Steps that are already applied are left out.
local function fence(self, incarnation, first, last, events, from, ending, ends)
  local record, count, applied, whole = self.record, self.c.count, 0, ending ~= 0
  local messages = whole and last - first + 1 or 0
  if incarnation ~= record[INCARNATION] then
    if below(incarnation, record[INCARNATION]) then
      count.stale = count.stale + messages
      return
    end
    if first ~= 0 or (from or 0) ~= 0 or not events[1] or events[1][EVENT_CODE] ~= CODE.begin then
      want(record, incarnation, last)
      count.gaps = count.gaps + messages
      return
    end
    record[INCARNATION], record[SEQ], record[BAD], record[CLOSED], record[OOM] = incarnation, -1, 0, 0, 0
    count.applied = count.applied + messages
  else
    if last <= record[SEQ] then
      count.duplicates = count.duplicates + messages
      return
    end
    if record[CLOSED] == 1 then
      want(record, incarnation, last)
      count.refused = count.refused + messages
      return
    end
    applied = ends and steps_applied(self.steps, incarnation, last) or 0
    if first > record[SEQ] + 1 or (from or 0) > applied then
      want(record, incarnation, last)
      count.gaps = count.gaps + messages
      return
    end
    if whole then
      count.duplicates = count.duplicates + record[SEQ] + 1 - first
      count.applied = count.applied + last - record[SEQ]
    end
  end
  self.seq = last
  if whole then
    record[SEQ], self.steps = last, false
  elseif ends[#ends] > applied then
    self.steps = incarnation .. string.format('%.0f %.0f', last, ends[#ends])
  end
  for i = 1, #events do
    if (not ends or ends[i] > applied) and not act[events[i][EVENT_CODE]](self, events[i]) then
      record[SEQ], self.steps = last, false -- the rest will not be applied
      return
    end
  end
end
