-- Why a worker that is online cannot work, written with each renewal of its lease. NULL: it can.

ALTER TABLE worker ADD COLUMN problem text;
